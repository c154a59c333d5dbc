import signal

import pytest
from run_checks import assert_same_run, rows, run_process
from tiny_run import model_config

from attention_residuals.layers.residual import AttnRes, StandardResidual

RULES = {"standard": StandardResidual(), "block": AttnRes(sublayers_per_block=2)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_compiled_run_has_the_losses_of_an_eager_one_and_resumes_to_the_same_bits(
    corpus, tmp_path, go, rule, monkeypatch
):
    # In processes of their own, because the shape checker of the tests cannot be compiled.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    go(folder=tmp_path / "eager", model=model_config(RULES[rule]))
    straight = run_process(corpus, tmp_path / "straight", "nothing", f"compiled-{rule}")
    assert straight.returncode == 0, straight.stderr
    assert any((tmp_path / "cache").iterdir())
    for eager, compiled in zip(rows(tmp_path / "eager"), rows(tmp_path / "straight"), strict=True):
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    killed = run_process(corpus, tmp_path / "run", "die_in_step_5", f"compiled-{rule}")
    assert killed.returncode == -signal.SIGKILL
    again = run_process(corpus, tmp_path / "run", "nothing", f"compiled-{rule}")
    assert again.stdout.split() == ["5", "6", "done", "6"]
    assert_same_run(tmp_path / "run", tmp_path / "straight")

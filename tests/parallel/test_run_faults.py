"""What goes wrong on one rank ends the run on all, with the rank and the step named, and it goes on from there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.run_cases import SAVING, config_of, distance_of_models, make_corpus, on_ranks

from attention_residuals.cli import main
from attention_residuals.errors import ConfigError
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import SECONDS_TO_REPORT, launched
from attention_residuals.parallel.watch import PATIENCE_SECONDS
from attention_residuals.train import load_checkpoint_model, train

SECONDS = 8.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(config_of(), corpus, folder, saving=SAVING, progress=False)
    return load_checkpoint_model(folder)


def run(tmp_path, corpus, place="ranks", victim=None, **case):
    case = {
        "what": "training",
        "parallel": {"shard": 2, "timeout_seconds": SECONDS},
        "config": {},
        "folder": str(tmp_path / "run"),
        **case,
    }
    (tmp_path / place).mkdir()
    return on_ranks(tmp_path / place, corpus, {"one": case}, victim)["one"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "patience"), [("dies", 0.0), ("hangs", SECONDS)])
def test_a_rank_that_dies_or_hangs_is_named_in_time_and_the_run_goes_on(
    tmp_path, corpus, alone, fault, patience
):
    found = run(tmp_path, corpus, victim=1, **{"fault": fault, "fault in step": 3})
    assert "rank 1 gives no sign since step 3" in found[0]["error"]
    assert "rank 0 waited for it in step" in found[0]["error"]
    assert found[0]["seconds"] <= patience + SECONDS_TO_REPORT + 10
    assert [rank["step"] for rank in run(tmp_path, corpus, "again")] == [6, 6]
    assert distance_of_models(load_checkpoint_model(tmp_path / "run"), alone) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("dies_in_a_forward", "rank 1 no longer answers in step 4; when last heard of, in step 4, it was "),
        (
            "hangs_in_a_forward",
            r"rank 1 did not go on in step 4: busy for \d+ s in the forward of microbatch 0 in stage 1",
        ),
    ],
)
def test_what_a_pipeline_finds_out_about_a_rank_is_told_as_it_is(tmp_path, corpus, fault, told):
    pipeline = {"pipeline": 2, "microbatches": 2, "timeout_seconds": SECONDS}
    in_two_passes = {"micro_batch_size": 4}  # what counts is the step, not the pass
    case = {"parallel": pipeline, "config": in_two_passes, "fault": fault, "fault in step": 3}
    found = run(tmp_path, corpus, victim=1, **case)
    assert re.match(f"RankError: got: {told}", found[0]["error"]), found[0]
    assert "on rank 0: " in found[0]["error"]
    assert found[0]["seconds"] <= SECONDS + PATIENCE_SECONDS + 10


@pytest.mark.slow
def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(tmp_path, corpus, alone):
    found = run(tmp_path, corpus, fault="dies_while_saving")
    assert found[1] == 9
    assert "rank 1 gives no sign" in found[0]["error"]
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == [".partial-step-00000004", "step-00000002"]
    ranks = run(tmp_path, corpus, "again")
    assert [rank["steps"][0] for rank in ranks] == [3, 3]
    assert distance_of_models(load_checkpoint_model(tmp_path / "run"), alone) <= 1e-5
    assert not list((tmp_path / "run").rglob(".partial-*"))


@pytest.mark.slow
def test_a_weight_that_breaks_on_one_rank_stops_all(tmp_path, corpus):
    found = run(tmp_path, corpus, **{"fault": "breaks_a_weight", "fault in step": 3})
    for rank in found:
        assert "NonFiniteError" in rank["error"]
        assert "at step 4" in rank["error"]
        assert "step-00000002" in rank["error"]


@pytest.mark.slow
def test_ranks_that_were_started_differently_are_refused(tmp_path, corpus):
    found = run(tmp_path, corpus, other={"seed": 4})
    for rank in found:
        assert "RankError" in rank["error"]
        assert "train.seed is 3 there and 4 here (there: rank 0; here: rank 1)" in rank["error"]
    found = run(tmp_path, corpus, "otherwise", **{"other parallel": {"shard": 1, "replicate": 2}})
    for rank in found:
        assert "parallel.replicate is 1 there and 2 here (there: rank 0; here: rank 1)" in rank["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_see_different_checkpoints_are_refused(tmp_path, corpus):
    run(tmp_path, corpus, until=4)
    found = run(tmp_path, corpus, "again", **{"sees an older checkpoint": True})
    for rank in found:
        assert "newest checkpoint" in rank["error"]
        assert "['step-00000004'] there and ['step-00000002'] here" in rank["error"]


@pytest.mark.slow
def test_ranks_that_do_not_share_a_disk_are_refused(tmp_path, corpus):
    for rank in run(tmp_path, corpus, **{"has another disk": True}):
        assert "the run's config.json is there is True there and False here" in rank["error"]
    assert not (tmp_path / "run-elsewhere").exists()


@pytest.mark.slow
def test_a_bug_on_one_rank_is_told_by_the_others(tmp_path, corpus):
    found = run(tmp_path, corpus, **{"fault": "fails", "fault in step": 3})
    assert found[1] == 1
    assert 'rank 1 failed in step 3: KeyError: "a bug of somebody\'s own"' in found[0]["error"]


def torchrun(*words, expected=0):
    """Starts two processes by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == expected, ran.stderr
    return ran


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again_by_itself(tmp_path, corpus, alone):
    script = Path(__file__).with_name("run_restarted.py")
    ran = torchrun("--max-restarts", "1", str(script), str(corpus.folder), str(tmp_path / "run"))
    first, second = ran.stdout.splitlines()
    assert first == "attempt 0 from step 1"
    assert second in ("attempt 1 from step 3", "attempt 1 from step 5")  # is step 4 saved by then?
    assert distance_of_models(load_checkpoint_model(tmp_path / "run"), alone) <= 1e-5


@pytest.mark.slow
def test_the_command_trains_on_two_ranks_and_its_run_is_like_any_other(tmp_path, capsys):
    (tmp_path / "tale.txt").write_text("\n\n".join(f"Once {n} ducks met {n % 7} swans." for n in range(200)))
    words = [
        "--source",
        str(tmp_path / "tale.txt"),
        "--depth",
        "2",
        "--vocab-size",
        "270",
        "--num-steps",
        "3",
    ]
    words += ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu"]
    folder = str(tmp_path / "run")
    ran = torchrun("-m", "attention_residuals.cli", "train", folder, *words, "--parallel.shard", "2")
    assert ran.stdout.count("3 steps done; the last evaluation: ") == 1
    assert main(["eval", folder, "--device", "cpu"]) == 0
    assert "bits per byte on the validation split" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run-$RANK", "folder is 'run-0' there and 'run-1' here"),
        ("run --num-steps $((3 + RANK))", "--num-steps is 3 there and 4 here"),
    ],
)
def test_ranks_with_another_command_are_refused_before_anything_is_written(tmp_path, words, told):
    command = f"cd {tmp_path} && {sys.executable} -m attention_residuals.cli train {words} --parallel.shard 2"
    ran = torchrun("--no-python", "bash", "-c", command, expected=1)
    assert ran.stderr.count(f"{told} (there: rank 0; here: rank 1)") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parallel", "config", "message"),
    [
        ({"shard": 3}, {}, "batch_size=8 for replicate x shard = 3 ranks.*batch of 9"),
        ({"pipeline": 2, "microbatches": 3}, {}, "8 at once, for 3 microbatches"),
        (
            {"pipeline": 2, "microbatches": 2},
            {"batch_size": 12, "micro_batch_size": 4, "num_layers": 1},
            "1 layers",
        ),
        ({"pipeline": 8, "microbatches": 8}, {}, "4 layers for 8 stages"),
        ({"pipeline": 2, "microbatches": 1}, {}, "1 microbatches for 1F1B"),
        ({"microbatches": 4}, {}, "microbatches=4 without a pipeline"),
        ({"shard": 2, "stages_per_rank": 2}, {}, "stages_per_rank=2 without a pipeline"),
        (
            {"pipeline": 2, "stages_per_rank": 2},
            {},
            "1 on each rank.*takes 2 on each rank: .*Interleaved1F1B",
        ),
        ({"pipeline": 2, "tensor": 2, "microbatches": 2}, {}, "pipeline together with tensor"),
        ({"tensor": 4}, {}, "tensor=4 with num_heads=2"),
        ({"pipeline": 2, "shard": 2, "schedule": "ZBVZeroBubble"}, {}, "ZBVZeroBubble together with shard"),
        ({"shard": 2}, {"compile": True}, "compile=True"),
    ],
)
def test_a_run_that_does_not_divide_is_refused(parallel, config, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        Parallel(**parallel).check(config_of(**config))
    Parallel().check(config_of(**config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard": 0}, "shard=0"),
        ({"tensor": True}, "tensor=True"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds=inf"),
        ({"schedule": "1F2B"}, "did you mean '1F1B'"),
    ],
)
def test_numbers_of_ranks_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Parallel(**values)


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "one process, for 2 ranks"), ({"RANK": "0", "WORLD_SIZE": "3"}, "3 processes")],
)
def test_a_world_of_another_size_is_refused(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), launched(Parallel(shard=2)):
        pass


def test_a_pipeline_has_as_many_microbatches_as_stages_unless_told_otherwise():
    for way in ({"pipeline": 2}, {"pipeline": 2, "stages_per_rank": 2, "schedule": "DualPipeV"}):
        Parallel(**way).check(config_of())
    assert Parallel(pipeline=2, stages_per_rank=2).num_microbatches == 4
    assert Parallel(pipeline=2, microbatches=8).num_microbatches == 8


def test_several_processes_without_a_word_how_to_share_the_work_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(tmp_path / "run"), "--num-steps", "20"]) == 2
    error = capsys.readouterr().err
    assert "2 processes" in error
    assert "--parallel.shard 2" in error
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_divide_is_refused_before_its_text_is_prepared(tmp_path, capsys):
    words = ["train", str(tmp_path / "run"), "--parallel.pipeline", "2", "--parallel.microbatches", "3"]
    assert main(words) == 2
    assert "16 at once, for 3 microbatches" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

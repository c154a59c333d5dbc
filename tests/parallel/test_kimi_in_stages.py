"""Two processes train Kimi Linear in stages and find what one finds: loss, gradients, and the balance of experts."""

import signal

import pytest
from parallel.kimi_cases import BIAS, SAVING, case, model_of, run_config
from parallel.rank_processes import run_groups
from parallel.run_cases import distance_of_models, make_corpus, rows_of

from attention_residuals.train import load_checkpoint_model, train

FEW = {
    "GPipe": case("GPipe", [2, 2]),
    "1F1B uneven, straddling": case("1F1B", [3, 1], "straddling"),
    "Interleaved1F1B, full": case("Interleaved1F1B", [1, 1, 1, 1], "full", masked=False),
}
CASES = {
    "GPipe uneven, full": case("GPipe", [1, 2], "full"),
    "GPipe standard": case("GPipe", [2, 2], "standard"),
    "1F1B even": case("1F1B", [2, 2], "block"),
    "1F1B standard, uneven": case("1F1B", [1, 3], "standard", masked=False),
    "Interleaved1F1B standard": case("Interleaved1F1B", [1, 1, 1, 1], "standard"),
    "Interleaved1F1B uneven": case("Interleaved1F1B", [2, 1, 1, 2], "straddling"),
    "checkpointed": case("Interleaved1F1B", [1, 2, 1, 1], "block", checkpoint_activations=True),
    "zero bubble": case("InterleavedZeroBubble", [1, 1, 1, 1], "straddling"),
    "V": case("ZBVZeroBubble", [1, 1, 1, 1], "full"),
}


def group_of(cases):
    return {"work": "cases", "num_ranks": 2, "cases": list(cases.values())}


def check(task, ranks):
    whole = model_of(sum(task["layers"]), task["rule"])
    assert sorted(name for rank in ranks for name in rank["names"]) == sorted(whole.state_dict())
    named = sorted(name for name, _ in whole.named_parameters())
    assert sorted(name for rank in ranks for name in rank["parameters"]) == named
    for rank in ranks:
        assert rank["losses"] <= 1e-6
        assert rank["gradients"] <= 1e-6
        assert rank["furthest"] <= 1e-5
        assert rank["weights"] <= 5e-6
        assert rank["biases"] == rank["expected biases"]
        assert rank["sent"] == rank["planned"]
    (logits,) = (rank["logits"] for rank in ranks if rank["logits"] is not None)
    assert logits <= 1e-6
    moved = [bias for rank in ranks for bias in rank["biases"].values()]
    assert len(moved) == sum(task["layers"]) - 1
    assert all(any(bias) for bias in moved)


def test_two_ranks_find_loss_gradients_and_balance_of_one(tmp_path):
    (found,) = run_groups(tmp_path, group_of(FEW), worker="kimi_worker.py")
    for number, name in enumerate(FEW):
        check(FEW[name], [rank[number] for rank in found])


@pytest.mark.slow
def test_other_schedules_rules_and_stages_do_so_too(tmp_path):
    (found,) = run_groups(tmp_path, group_of(CASES), worker="kimi_worker.py")
    for number, name in enumerate(CASES):
        check(CASES[name], [rank[number] for rank in found])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("data"))


def stages(corpus, folder, until):
    parallel = {"pipeline": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "microbatches": 2}
    return {
        "work": "run",
        "num_ranks": 2,
        "parallel": parallel,
        "corpus": str(corpus.folder),
        "run folder": str(folder),
        "until": until,
    }


def stopping(at):
    def monitor(step, model):
        if step == at:
            signal.raise_signal(signal.SIGTERM)

    return monitor


@pytest.mark.slow
def test_a_run_goes_on_from_stages_to_one_process_and_back(tmp_path, corpus):
    together, alone = tmp_path / "run", tmp_path / "alone"
    config = run_config()
    train(config, corpus, alone, saving=SAVING, progress=False)
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    (first,) = run_groups(places[0], stages(corpus, together, 2), worker="kimi_worker.py")
    assert [rank["step"] for rank in first] == [2, 2]
    train(config, corpus, together, saving=SAVING, progress=False, monitor=stopping(4))
    (last,) = run_groups(places[1], stages(corpus, together, 6), worker="kimi_worker.py")
    assert [rank["step"] for rank in last] == [6, 6]
    found, expected = (load_checkpoint_model(folder) for folder in (together, alone))
    assert distance_of_models(found, expected) <= 1e-4
    biases = {name: bias for name, bias in expected.state_dict().items() if BIAS in name}
    assert len(biases) == 3
    for name, bias in biases.items():
        assert bias.any()
        assert found.state_dict()[name].equal(bias)
    for ours, theirs in zip(rows_of(together), rows_of(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for ours, theirs in zip(rows_of(together, "valid"), rows_of(alone, "valid"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)

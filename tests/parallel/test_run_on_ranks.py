"""Runs on 2 and 4 ranks compute what one process computes, and go on from one another's checkpoints."""

import signal

import pytest
from parallel.run_cases import SAVING, config_of, distance_of_models, make_corpus, on_ranks, rows_of

from attention_residuals.train import load_checkpoint_model, load_run, train

WAYS = {
    "copies": {"replicate": 2},
    "shards": {"shard": 2},
    "split matrices": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "stages in turn": {
        "pipeline": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "microbatches": 2
    },
}  # fmt: skip
MORE = {
    "copies of shards": {"replicate": 2, "shard": 2},
    "shards on four": {"shard": 4},
    "shards of split matrices": {"shard": 2, "tensor": 2},
    "copies of split matrices": {"replicate": 2, "tensor": 2},
    "pipelines of shards": {"shard": 2, "pipeline": 2, "microbatches": 2},
    "copies of pipelines": {"replicate": 2, "pipeline": 2, "microbatches": 2},
    "stages in turn, of shards": {
        "shard": 2, "pipeline": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "microbatches": 2
    },
}  # fmt: skip
VARIANTS = {
    "tied": {},
    "full, untied, in parts": {"rule": "full", "tied": False, "micro_batch_size": 2},
    "in parts": {"micro_batch_size": 2},
    "recomputed": {"checkpoint_activations": True, "cross_documents": True},
    "bfloat16": {"precision": "bfloat16"},
    "muon": {"optimizer": "muon"},
}
STEPPED = {"adamw": 1e-3, "muon": 1e-2, "bfloat16": 0.1}
"""How far apart an optimizer's first step may be, of its length."""


def first_steps(ways, variants):
    return {
        f"{way}, {variant}": {"what": "first step", "parallel": ways[way], "config": VARIANTS[variant]}
        for way in ways
        for variant in variants
    }


TWO = first_steps(WAYS, [variant for variant in VARIANTS if variant != "in parts"])
TWO |= {
    f"{way}, scored": {
        "what": "first step",
        "parallel": WAYS[way],
        "config": VARIANTS["in parts"],
        "scored": 30,
    }
    for way in ("copies", "shards", "pipeline")
}
FOUR = first_steps(MORE, ("full, untied, in parts", "muon"))
FEW = first_steps({way: WAYS[way] for way in ("copies", "shards", "pipeline")}, ("tied",))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def two(tmp_path_factory, corpus):
    return on_ranks(tmp_path_factory.mktemp("two"), corpus, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory, corpus):
    return on_ranks(tmp_path_factory.mktemp("four"), corpus, FOUR)


def check(case, ranks):
    exact = case["config"].get("precision") != "bfloat16"
    for rank in ranks:
        assert isinstance(rank, dict), rank
        assert rank["loss"] <= (1e-6 if exact else 3e-3)
        assert rank["gradients"] <= (1e-6 if exact else 3e-2)
        assert rank["worst"] <= (1e-4 if exact else 0.3)  # of the parameter that is furthest off
        assert rank["norm"] <= (1e-6 if exact else 1e-2)
        assert rank["stepped"] <= STEPPED[case["config"].get("optimizer", "adamw") if exact else "bfloat16"]
        assert rank["valid"] <= (1e-6 if exact else 3e-3)
    parallel = case["parallel"]
    if parallel.get("shard", 1) > 1 and parallel.get("pipeline", 1) == 1:
        assert all(rank["held"] < rank["all"] / parallel["shard"] + 600 for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_find_loss_gradients_and_validation_of_one(two, name):
    check(TWO[name], two[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_find_loss_gradients_and_validation_of_one(four, name):
    check(FOUR[name], four[name])


def test_copies_shards_and_a_pipeline_find_what_one_process_finds(tmp_path, corpus):
    found = on_ranks(tmp_path, corpus, FEW)
    for name, case in FEW.items():
        check(case, found[name])


def trained(folder, way, steps, **config):
    """A case that trains a run in a folder up to a step."""
    return {
        "what": "training",
        "parallel": way,
        "config": config,
        "folder": str(folder),
        "until": steps,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("muon", 2e-3)])
def test_a_run_goes_on_from_four_ranks_to_two_to_one_and_back(tmp_path, corpus, optimizer, tolerance):
    together, alone = tmp_path / "run", tmp_path / "alone"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    options = {"optimizer": optimizer, "num_steps": 26}
    four = {"shard": 2, "pipeline": 2, "microbatches": 2}
    on_ranks(first, corpus, {"4": trained(together, four, 20, **options)})
    on_ranks(second, corpus, {"2": trained(together, {"shard": 2}, 22, **options)})
    config = config_of(**options)
    train(config, corpus, together, saving=SAVING, progress=False, monitor=stopping(24))
    (last,) = on_ranks(third, corpus, {"4": trained(together, four, 26, **options)}).values()
    assert [(rank["steps"], rank["step"]) for rank in last] == [([25, 26], 26)] * 4
    train(config, corpus, alone, saving=SAVING, progress=False)
    assert distance_of_models(load_checkpoint_model(together), load_checkpoint_model(alone)) <= tolerance
    assert [row["step"] for row in rows_of(together)] == list(range(1, 27))
    for ours, theirs in zip(rows_of(together), rows_of(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=10 * tolerance)
        assert ours["learning_rate"] == theirs["learning_rate"]


def stopping(at):
    def monitor(step, model):
        if step == at:
            signal.raise_signal(signal.SIGTERM)

    return monitor


def test_a_sharded_run_is_a_folder_like_any_other(tmp_path, corpus):
    case = {
        "what": "training",
        "parallel": {"shard": 2},
        "config": {"num_steps": 4},
        "folder": str(tmp_path / "run"),
    }
    ((lead, other),) = on_ranks(tmp_path, corpus, {"two": case}).values()
    assert lead == other
    assert lead["step"] == 4
    assert load_run(tmp_path / "run").config == config_of(num_steps=4)
    alone = tmp_path / "alone"
    result = train(config_of(num_steps=4), corpus, alone, saving=SAVING, progress=False)
    assert lead["loss"] == pytest.approx(result.loss, rel=1e-5)
    assert distance_of_models(load_checkpoint_model(tmp_path / "run"), load_checkpoint_model(alone)) <= 1e-6
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-00000004")
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "config.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
        "state.json",
    ]

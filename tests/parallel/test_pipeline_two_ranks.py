"""Two processes train a decoder in stages and find what one finds; every schedule."""

import pytest
from parallel.pipeline_cases import check, run_ranks

V2 = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def case(schedule, layers, rule="block", transport="cached", steps=1, microbatches=4, **model):
    return {
        "schedule": schedule,
        "layers": layers,
        "model": {"rule": rule, **model},
        "transport": transport,
        "steps": steps,
        "batch": microbatches,
        "microbatches": microbatches,
    }


CASES = {
    "GPipe": case("GPipe", [1, 1]),
    "1F1B uneven, tied": case("1F1B", [3, 1], "straddling", tied=True),
    "1F1B standard": case("1F1B", [1, 2], "standard"),
    **{f"{schedule} even": case(schedule, [1] * 4) for schedule in V2},
    **{f"{schedule} uneven": case(schedule, [2, 1, 3, 1], "straddling") for schedule in V2},
    **{f"{schedule} in float32": case(schedule, [1] * 4, dtype="float32") for schedule in V2},
    "three stages on each": case("Interleaved1F1B", [1] * 6, "full", tied=True, steps=2),
    "three stages on each, zero bubble": case("InterleavedZeroBubble", [1] * 6, "straddling", steps=2),
    "V, tied on one rank": case("ZBVZeroBubble", [1] * 4, "standard", tied=True),
    "checkpointed": case("Interleaved1F1B", [1, 2, 1, 2], checkpoint_activations=True, tied=True, steps=2),
    "checkpointed, zero bubble": case(
        "InterleavedZeroBubble", [1] * 4, "straddling", dtype="float32", checkpoint_activations=True
    ),
    "naive": case("Interleaved1F1B", [2, 1, 1, 1], "straddling", "naive"),
    "naive V": case("DualPipeV", [2, 1, 1, 1], "straddling", "naive"),
    "paper's": case("LoopedBFS", [1] * 6, "full", "paper"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, list(CASES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_find_loss_logits_and_every_gradient_of_one(found, name):
    check(CASES[name], [rank[list(CASES).index(name)] for rank in found])


def test_two_ranks_with_one_stage_each_find_what_one_finds(tmp_path):
    few = [CASES["GPipe"], CASES["1F1B uneven, tied"]]
    found = run_ranks(tmp_path, 2, few)
    for number, task in enumerate(few):
        check(task, [rank[number] for rank in found])

"""Four processes: the toy whose tensors are counted, and deep interleaving."""

import pytest
from parallel.pipeline_cases import check, run_ranks
from parallel.test_pipeline_two_ranks import case

CASES = {
    "1F1B": case("1F1B", [2, 1, 1, 1], "straddling", tied=True),
    "GPipe": case("GPipe", [1] * 4, "full"),
    "toy, V = 2": case("Interleaved1F1B", [1] * 8, microbatches=8),
    "toy, V = 2, naive": case("Interleaved1F1B", [1] * 8, transport="naive", microbatches=8),
    "toy, V = 3": case("Interleaved1F1B", [1] * 12, microbatches=4),
    "toy, V = 3, naive": case("Interleaved1F1B", [1] * 12, transport="naive", microbatches=4),
    "zero bubble, V = 3": case("InterleavedZeroBubble", [1, 2] * 6, "straddling", microbatches=4),
    "ZBV": case("ZBVZeroBubble", [1, 2, 1, 1, 1, 1, 1, 2], "straddling", tied=True, microbatches=8),
    "DualPipeV": case("DualPipeV", [1] * 8, "full", microbatches=8),
    "LoopedBFS": case("LoopedBFS", [1] * 8, "standard", dtype="float32", microbatches=8),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), 4, list(CASES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_find_loss_logits_and_every_gradient_of_one(found, name):
    check(CASES[name], [rank[list(CASES).index(name)] for rank in found])


@pytest.mark.slow
def test_tensors_that_really_cross_fall_from_35_to_21_and_from_77_to_33(found):
    counts = {}
    for name in CASES:
        task, ranks = CASES[name], [rank[list(CASES).index(name)] for rank in found]
        tensor_bytes = 6 * 16 * 8  # tokens of a microbatch, width, float64
        counts[name] = sum(rank["sent"][0] for rank in ranks) / (task["microbatches"] * tensor_bytes)
    assert (counts["toy, V = 2, naive"], counts["toy, V = 2"]) == (35, 21)
    assert (counts["toy, V = 3, naive"], counts["toy, V = 3"]) == (77, 33)

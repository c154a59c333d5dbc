"""Four processes: the toy whose tensors are counted, and deep interleaving."""

import pytest
from parallel.pipeline_cases import case, problems
from parallel.rank_processes import run_groups

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
    "bfloat16": case("Interleaved1F1B", [1] * 8, "straddling", dtype="bfloat16", checkpoint_activations=True),
}


@pytest.mark.slow
def test_four_ranks_find_loss_logits_and_every_gradient_of_one(tmp_path):
    group = {"work": "cases", "num_ranks": 4, "cases": list(CASES.values())}
    (ranks,) = run_groups(tmp_path, group)
    found = dict(zip(CASES, zip(*ranks, strict=True), strict=True))
    told = {name: problems(CASES[name], found[name]) for name in CASES}
    assert not {name: lines for name, lines in told.items() if lines}
    counts = {}
    for name, results in found.items():  # tensors that really cross, for one microbatch
        tensor_bytes = 6 * 16 * 8  # tokens of a microbatch, width, float64
        counts[name] = sum(rank["sent"][0] for rank in results) / (CASES[name]["microbatches"] * tensor_bytes)
    assert (counts["toy, V = 2, naive"], counts["toy, V = 2"]) == (35, 21)
    assert (counts["toy, V = 3, naive"], counts["toy, V = 3"]) == (77, 33)

"""Two processes train a decoder in stages and find what one finds; every schedule."""

import pytest
from parallel.pipeline_cases import case, model_of, problems
from parallel.rank_processes import run_groups

from attention_residuals.parallel.estimate import estimate

V2 = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

FEW = {
    "GPipe": case("GPipe", [1, 1]),
    "1F1B uneven, tied": case("1F1B", [3, 1], "straddling", tied=True),
}
CASES = {
    "1F1B standard": case("1F1B", [1, 2], "standard"),
    **{f"{schedule} even": case(schedule, [1] * 4) for schedule in V2},
    **{f"{schedule} uneven": case(schedule, [2, 1, 3, 1], "straddling") for schedule in V2},
    **{f"{schedule} in float32": case(schedule, [1] * 4, dtype="float32") for schedule in V2},
    **{f"{schedule} in bfloat16": case(schedule, [1] * 4, dtype="bfloat16") for schedule in V2},
    "three stages on each": case("Interleaved1F1B", [1] * 6, "full", tied=True, steps=2),
    "three stages on each, zero bubble": case("InterleavedZeroBubble", [1] * 6, "straddling", steps=2),
    "V, tied on one rank": case("ZBVZeroBubble", [1] * 4, "standard", tied=True),
    "checkpointed": case("Interleaved1F1B", [1, 2, 1, 2], checkpoint_activations=True, tied=True, steps=2),
    "checkpointed, zero bubble": case(
        "InterleavedZeroBubble", [1] * 4, "straddling", dtype="float32", checkpoint_activations=True
    ),
    "checkpointed bfloat16": case(
        "DualPipeV", [2, 1, 1, 1], "full", dtype="bfloat16", checkpoint_activations=True
    ),
    "standard in bfloat16": case("GPipe", [2, 1], "standard", dtype="bfloat16", tied=True),
    "autocast": case("1F1B", [1, 2], "standard", dtype="float32", precision="bfloat16"),
    "autocast, bfloat16 sources": case(
        "Interleaved1F1B", [1] * 4, dtype="float32", precision="bfloat16", source_dtype="bfloat16"
    ),
    "autocast, checkpointed": case(
        "ZBVZeroBubble", [1] * 4, "full", dtype="float32", precision="bfloat16", checkpoint_activations=True
    ),
    "naive": case("Interleaved1F1B", [2, 1, 1, 1], "straddling", "naive"),
    "naive V": case("DualPipeV", [2, 1, 1, 1], "straddling", "naive"),
    "paper's": case("LoopedBFS", [1] * 6, "full", "paper"),
}
COMPILED = {
    "GPipe": case("GPipe", [1, 1], "standard", compile="aot_eager"),
    "1F1B": case("1F1B", [1, 1], "full", compile="aot_eager"),
    "LoopedBFS": case("LoopedBFS", [1] * 4, compile="aot_eager"),
    "Interleaved1F1B": case("Interleaved1F1B", [1] * 4, "straddling", compile="aot_eager", steps=2),
}
TRAINED = {
    "1F1B": case("1F1B", [1, 2], "full", tied=True),
    "Interleaved1F1B": case("Interleaved1F1B", [1] * 4, checkpoint_activations=True),
    "ZBVZeroBubble": case("ZBVZeroBubble", [1, 1, 2, 1], "straddling", tied=True),
}


def group_of(cases, work="cases"):
    return {"work": work, "num_ranks": 2, "cases": list(cases.values())}


def wrong(cases, found):
    told = {name: problems(cases[name], [rank[i] for rank in found]) for i, name in enumerate(cases)}
    return {name: lines for name, lines in told.items() if lines}


def test_two_ranks_with_one_stage_each_find_what_one_finds(tmp_path):
    (found,) = run_groups(tmp_path, group_of(FEW))
    assert not wrong(FEW, found)


@pytest.mark.slow
def test_two_ranks_find_loss_logits_and_every_gradient_of_one(tmp_path):
    found, compiled, trained = run_groups(
        tmp_path, group_of(CASES), group_of(COMPILED), group_of(TRAINED, "training")
    )
    assert not wrong(CASES, found)
    assert not wrong(COMPILED, compiled)
    for ranks in zip(*trained, strict=True):
        assert all(rank["losses"] <= 1e-10 and rank["parameters"] <= 1e-10 for rank in ranks)
        assert (
            len({rank["embedding"] for rank in ranks} - {None}) == 1
        )  # tied copies stay the same, bit by bit
    sent = {name: [rank[number]["sent"] for rank in found] for number, name in enumerate(CASES)}
    for schedule in V2:
        halves, wholes = sent[f"{schedule} in bfloat16"], sent[f"{schedule} in float32"]
        assert [[2 * count for count in rank] for rank in halves] == wholes
    assert sent["autocast, bfloat16 sources"] == sent["Interleaved1F1B in bfloat16"]
    assert sent["Interleaved1F1B in bfloat16"] == planned_on_paper()


def planned_on_paper():
    """What ``attnres plan`` counts for the ranks of the bfloat16 case."""
    found = estimate(
        model_of(4).config,
        num_ranks=2,
        stages_per_rank=2,
        num_microbatches=4,
        num_tokens=6,
        schedule="Interleaved1F1B",
        itemsize=2,
    )
    counts = [found.plans["cached"].num_sent_by(rank) for rank in range(2)]
    return [[4 * count * found.piece_bytes for count in rank] for rank in counts]

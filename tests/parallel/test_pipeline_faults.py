"""What goes wrong between processes is told, and nobody waits for ever."""

import pytest
from parallel.pipeline_cases import alone, batch_of, model_of
from parallel.rank_processes import run_groups

from attention_residuals.parallel.watch import PATIENCE_SECONDS

TIMEOUT = 10

FAULTS = {
    "dies": (2, "waiting for another rank|in the forward of microbatch 1 in stage 2"),
    "leaves": (1, "it was between steps"),
    "stops": (0, "waiting for another rank|in the forward of microbatch 1 in stage 0"),
    "hangs": (1, "in the forward of microbatch 1 in stage 1"),
    "raises": (2, "in the forward of microbatch 1 in stage 2: NonFiniteError: got: a source of NaN"),
}


def test_what_ranks_cannot_run_together_is_refused_by_all_and_the_next_step_works(tmp_path):
    (found,) = run_groups(tmp_path, {"work": "refusals", "num_ranks": 2})
    expected = [alone(model_of(4), *batch_of(4, length))[0] for length in (6, 4, 6)]
    given = "RankError: got: ranks that were given different things: "
    started = "RankError: got: ranks that were started with different things: "
    whose = " (there: rank 0; here: rank 1)\n"
    for told in found:
        shape = "shape of tokens is [4, 6] there and [4, 5] here"
        assert told["other shapes"].startswith(f"{given}{shape}{whose}")
        assert "they differ between rank 0 and rank 1" in told["other shapes"]
        assert told["other tokens"].startswith(f"{given}fingerprint of tokens is ")
        assert told["other options"].startswith(f"{started}layers is [3, 1] there and [1, 3] here{whose}")
        assert told["other weights"].startswith(f"{started}fingerprint of the weights is ")
        assert "ConfigError: got: 3 stages on 2 ranks" in told["world size"]
        assert "ConfigError: got: stages of (1, 1, 1, 1, 0, 0) layers" in told["too many stages"]
        assert "ShapeError: got: a batch of 3 sequences for 2 microbatches" in told["odd batch"]
        assert told["losses"] == pytest.approx(expected, rel=1e-10)
        assert told["left"] == 0
    both = {name: [told[name] for told in found] for name in found[0]}
    refused = "RankError: got: rank 1 refused what it was"
    for name, own in (
        ("one refuses its options", "ConfigError: got: 1 microbatches for 1F1B"),
        ("one refuses its batch", "DataError: got: token ids"),
        ("one compiled", "ConfigError: got: a compiled stage under ZBVZeroBubble"),
    ):
        assert both[name][0].startswith(refused)
        assert both[name][1].startswith(own)


@pytest.mark.slow
def test_a_rank_that_ends_the_run_is_named_by_all_others_with_the_step(tmp_path):
    groups = [
        {"work": "fault", "num_ranks": 3, "seconds": TIMEOUT, "how": how, "victim": victim}
        for how, (victim, _) in FAULTS.items()
    ]
    groups[1]["meets_by"] = groups[4]["meets_by"] = "tcp"
    groups[1]["slow"] = 2  # which still finds the store, kept by rank 0, when rank 0 knows all
    store = {**groups[0], "victim": 0, "meets_by": "tcp"}  # of which rank 0 keeps the store
    *found, without_store = run_groups(tmp_path, *groups, store)
    for (how, (victim, told)), ranks in zip(FAULTS.items(), found, strict=True):
        lost = ranks[victim]
        if how == "raises":
            assert lost["error"].startswith("NonFiniteError: got: a source of NaN")
        else:
            assert lost == {"dies": 9, "leaves": 9, "stops": -9, "hangs": -9}[how]
        for rank in {0, 1, 2} - {victim}:
            first = ranks[rank]["error"].splitlines()[0]
            assert first.startswith(f"RankError: got: rank {victim} "), (how, rank, first)
            assert "in step 2" in first
            assert any(part in first for part in told.split("|")), (how, rank, first)
            assert ranks[rank]["seconds"] <= TIMEOUT + PATIENCE_SECONDS + 10
            assert ranks[rank]["left"] == 0
    for rank in without_store[1:]:
        assert "keeps the ranks' store no longer answers: rank 0" in rank["error"]
        assert rank["seconds"] <= TIMEOUT + PATIENCE_SECONDS + 10

"""What goes wrong between processes is told, and nobody waits for ever."""

import pytest
from parallel.pipeline_cases import alone, batch_of, model_of, run_ranks


@pytest.mark.slow
def test_what_ranks_cannot_run_together_is_refused_by_all_and_the_next_step_works(tmp_path):
    found = run_ranks(tmp_path, 2, {"what": "refusals", "seconds": 120}, "faulty_worker.py")
    for rank, told in enumerate(found):
        assert f"rank {rank}: [({4}, {6 - rank})" in told["other batches"]
        assert told["other batches"].startswith("RankError: got: ranks that were given different things")
        assert told["other options"].startswith("RankError: got: ranks that were started with different")
        assert "ConfigError: got: 3 stages on 2 ranks" in told["world size"]
        assert "ConfigError: got: stages of (1, 1, 1, 1, 0, 0) layers" in told["too many stages"]
        assert "ShapeError: got: a batch of 3 sequences for 2 microbatches" in told["odd batch"]
        assert "DataError" in told["bad token"]
        expected = [alone(model_of(4), *batch_of(4, length))[0] for length in (6, 4, 6)]
        assert told["losses"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_no_longer_answers_ends_the_others_with_rank_and_step_named(how, tmp_path):
    survivor, lost = run_ranks(tmp_path, 2, {"what": how, "seconds": 10}, "faulty_worker.py")
    if how == "dies":
        assert lost == 9
    assert survivor["error"].startswith("RankError: got: rank 0 failed in step 2: ")
    assert "exchanges with rank 1" in survivor["error"]
    assert survivor["seconds"] <= 25

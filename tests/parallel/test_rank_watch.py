"""What a rank concludes from what the others last said; the others are written by hand."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from attention_residuals.errors import NonFiniteError, RankError
from attention_residuals.parallel import watch
from attention_residuals.parallel.watch import Watch


@pytest.fixture
def rank_0(tmp_path, monkeypatch):
    """The watch of rank 0 in a group of three, of which the other two say what a test lets them."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.05)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    own = Watch()
    own._others = [1, 2]
    yield own
    dist.destroy_process_group()


def say(own, rank, beat=1, step=4, doing="", seconds=0.0, turn=None, verdict=""):
    turn = step - 3 if turn is None else turn  # step 4 is the first that rank 0 begins
    own._store.set(f"rank {rank}", json.dumps([beat, step, doing, seconds, turn, verdict]))


def lively(own, monkeypatch, **ranks):
    """Lets every other rank say a new word each time it is asked."""
    real, asked = own._words, []

    def words():
        asked.append(1)
        for rank, options in enumerate(ranks.values(), 1):
            if options is not None:
                say(own, rank, beat=2 * len(asked), **options)
        return real()

    monkeypatch.setattr(own, "_words", words)


def ended(own):
    with pytest.raises(RankError) as found, own.during(4):
        raise RuntimeError("connection closed")
    assert "on rank 0: RuntimeError: connection closed" in str(found.value)
    assert own._word.verdict == found.value.got  # for the others to repeat
    return found.value.got


def test_who_says_nothing_new_is_named_with_what_it_last_did(rank_0, monkeypatch):
    say(rank_0, 1, beat=7, doing="in the backward of microbatch 1 in stage 1")
    lively(rank_0, monkeypatch, one=None, two={})
    assert ended(rank_0) == (
        "rank 1 no longer answers in step 4; when last heard of, in step 4, "
        "it was in the backward of microbatch 1 in stage 1"
    )


def test_who_was_never_heard_of_or_did_not_come_to_the_step_is_named(rank_0):
    say(rank_0, 2, step=3, doing="between steps")
    assert ended(rank_0) == (
        "rank 1 no longer answers in step 4; when last heard of, in step 0, it never began; "
        "rank 2 no longer answers in step 4; when last heard of, in step 3, it was between steps"
    )


def test_who_is_busy_for_longest_while_others_wait_is_named(rank_0, monkeypatch):
    lively(
        rank_0,
        monkeypatch,
        one={"doing": "in the loss", "seconds": 1.0},
        two={"doing": "in the forward", "seconds": 31.2},
    )
    assert ended(rank_0) == "rank 2 did not go on in step 4: busy for 31 s in the forward"


def test_what_another_rank_found_is_repeated_unless_it_is_of_another_step(rank_0, monkeypatch):
    say(rank_0, 1, verdict="rank 2 no longer answers")
    assert ended(rank_0) == "rank 2 no longer answers"
    lively(rank_0, monkeypatch, one={"step": 3, "verdict": "rank 2 no longer answers"}, two={})
    assert ended(rank_0) == "rank 0 failed in step 4: RuntimeError: connection closed"


def test_who_has_finished_the_step_is_not_to_blame(rank_0, monkeypatch):
    say(rank_0, 2, doing="between steps")
    lively(rank_0, monkeypatch, one={}, two=None)
    assert ended(rank_0) == "rank 0 failed in step 4: RuntimeError: connection closed"


def test_who_has_finished_only_an_earlier_part_of_the_step_is_named(rank_0, monkeypatch):
    say(rank_0, 2, doing="between steps", turn=0)
    lively(rank_0, monkeypatch, one={}, two=None)
    assert ended(rank_0) == (
        "rank 2 no longer answers in step 4; when last heard of, in step 4, it was between steps"
    )


def test_a_rank_that_fails_in_its_own_work_asks_nobody_who_did(rank_0, monkeypatch):
    monkeypatch.setattr(rank_0, "_asked", None)
    expected = "got: rank 0 failed in step 4 in the loss: RuntimeError: no luck"
    with pytest.raises(RankError, match=expected), rank_0.during(4), rank_0.doing("in the loss"):
        raise RuntimeError("no luck")
    with pytest.raises(NonFiniteError, match="got: NaN"), rank_0.during(4), rank_0.doing("in stage 2"):
        raise RuntimeError("wrapped") from NonFiniteError(got="NaN", expected="numbers", do="stop")
    said = json.loads(rank_0._store.get("rank 0"))
    assert "rank 0 failed in step 4 in stage 2: NonFiniteError: got: NaN" in said[-1]
    with pytest.raises(ZeroDivisionError), rank_0.during(5), rank_0.doing("in the loss"):
        1 / 0  # noqa: B018
    assert "step 5 in the loss: ZeroDivisionError" in rank_0._word.verdict


def test_a_store_that_is_gone_is_told(rank_0, monkeypatch):
    def gone(*_):
        raise RuntimeError("broken pipe")

    monkeypatch.setattr(rank_0, "_store", SimpleNamespace(set=gone, check=gone))
    assert ended(rank_0).startswith("the process that keeps the ranks' store no longer answers: rank 0")


def test_a_rank_in_a_step_says_again_and_again_that_it_lives(rank_0):
    with rank_0.during(4):
        first = json.loads(rank_0._store.get("rank 0"))
        while json.loads(rank_0._store.get("rank 0"))[0] < first[0] + 3:
            pass
    last = json.loads(rank_0._store.get("rank 0"))
    assert (last[1], last[2]) == (4, "between steps")

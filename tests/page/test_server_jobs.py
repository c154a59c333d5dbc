"""One pass at a time: places in the queue, what replaces what, and how jobs end."""

import queue
import threading
import time

import pytest

from attention_residuals.errors import DataError
from attention_residuals.page.jobs import ENDS, Job, Jobs, QueueFullError

SECONDS = 20


class Asker:
    """A job that runs until it is let go, and what it has told."""

    def __init__(self, owner="me", kind="trace", work=None):
        self.events = queue.Queue()
        self.may_end, self.is_running = threading.Event(), threading.Event()
        self.job = Job(owner=owner, kind=kind, work=work or self.wait, tell=self.events.put)

    def wait(self, check):
        self.is_running.set()
        yield {"type": "token"}
        assert self.may_end.wait(SECONDS)
        check()
        yield {"type": "done"}

    def next(self):
        return self.events.get(timeout=SECONDS)

    def until_the_end(self):
        events = [self.next()]
        while events[-1]["type"] not in ENDS:
            events.append(self.next())
        assert self.events.empty()
        return [event["type"] for event in events]


@pytest.fixture
def jobs():
    found = Jobs(max_waiting=3)
    yield found
    found.close()


@pytest.fixture
def busy(jobs):
    """Something that runs until it may end."""
    asker = Asker(owner="busy")
    jobs.submit(asker.job)
    assert asker.is_running.wait(SECONDS)
    yield asker
    asker.may_end.set()


def submitted(jobs, *askers):
    for asker in askers:
        asker.may_end.set()
        jobs.submit(asker.job)
    return askers


def test_one_job_runs_at_a_time_and_each_sees_its_place(jobs, busy):
    first, second = submitted(jobs, Asker(owner="a"), Asker(owner="b"))
    assert first.next() == {"type": "waiting", "ahead": 1}
    assert second.next() == {"type": "waiting", "ahead": 2}
    assert not first.is_running.is_set()
    busy.may_end.set()
    assert busy.until_the_end() == ["started", "token", "done"]
    assert first.until_the_end() == ["started", "token", "done"]
    assert second.next() == {"type": "waiting", "ahead": 1}
    assert second.until_the_end() == ["started", "token", "done"]


def test_a_newer_request_of_the_same_kind_takes_the_place_of_one_that_waits(jobs, busy):
    old, other, newer = submitted(jobs, Asker(owner="a"), Asker(owner="b"), Asker(owner="a"))
    assert old.until_the_end() == ["waiting", "replaced"]
    assert newer.next() == {"type": "waiting", "ahead": 1}
    busy.may_end.set()
    assert newer.until_the_end()[-1] == other.until_the_end()[-1] == "done"
    assert not old.is_running.is_set()


@pytest.mark.parametrize("other", [Asker(owner="b"), Asker(kind="compare")], ids=["owner", "kind"])
def test_requests_of_others_and_of_other_kinds_stay(jobs, busy, other):
    mine, other = submitted(jobs, Asker(owner="me"), other)
    busy.may_end.set()
    assert mine.until_the_end()[-1] == other.until_the_end()[-1] == "done"


def test_what_runs_is_not_replaced(jobs):
    running = Asker()
    jobs.submit(running.job)
    assert running.is_running.wait(SECONDS)
    (newer,) = submitted(jobs, Asker())
    running.may_end.set()
    assert running.until_the_end()[-1] == newer.until_the_end()[-1] == "done"


def test_too_many_are_refused_but_replacing_is_no_more(jobs, busy):
    waiting = submitted(jobs, *(Asker(owner=name) for name in "abc"))
    with pytest.raises(QueueFullError, match="behind 3 that wait"):
        jobs.submit(Asker(owner="d").job)
    (newer,) = submitted(jobs, Asker(owner="b"))
    busy.may_end.set()
    ends = [asker.until_the_end()[-1] for asker in (*waiting, newer)]
    assert ends == ["done", "replaced", "done", "done"]


def test_cancelling_drops_what_waits_and_ends_what_runs_at_its_next_check(jobs, busy):
    mine, other = submitted(jobs, Asker(owner="busy", kind="compare"), Asker(owner="other"))
    assert jobs.cancel(lambda job: job.owner == "busy") == 2
    assert mine.until_the_end() == ["waiting", "cancelled"]
    assert other.next() == {"type": "waiting", "ahead": 2}
    assert other.next() == {"type": "waiting", "ahead": 1}
    busy.may_end.set()
    assert busy.until_the_end() == ["started", "token", "cancelled"]
    assert other.until_the_end()[-1] == "done"
    assert not mine.is_running.is_set()


def test_work_without_a_check_still_ends_between_its_events(jobs):
    asker = Asker(work=lambda check: iter([{"type": "token"}, {"type": "done"}]))
    asker.job.cancel()
    jobs.submit(asker.job)
    assert asker.until_the_end() == ["started", "cancelled"]


def test_an_error_is_told_and_the_next_job_runs(jobs):
    def wrong(check):
        raise DataError(got="a", expected="b", do="c")
        yield

    asker = Asker(work=wrong)
    jobs.submit(asker.job)
    assert [asker.next() for _ in range(2)][1] == {"type": "error", "got": "a", "expected": "b", "do": "c"}
    (after,) = submitted(jobs, Asker())
    assert after.until_the_end()[-1] == "done"


def test_a_fault_is_told_without_details_and_shown_in_the_terminal(jobs, capsys):
    asker = Asker(work=lambda check: iter([1 / 0]))
    jobs.submit(asker.job)
    told = [asker.next() for _ in range(2)][1]
    assert told["type"] == "error"
    assert "see the terminal" in told["do"]
    assert "Zero" not in str(told)
    (after,) = submitted(jobs, Asker())
    assert after.until_the_end()[-1] == "done"
    jobs.close()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_closing_ends_everything_and_takes_no_more():
    jobs, waiting = Jobs(), Asker(owner="a")

    def forever(check):
        running.is_running.set()
        while True:
            check()
            time.sleep(0.001)
        yield

    running = Asker(work=forever)
    jobs.submit(running.job)
    assert running.is_running.wait(SECONDS)
    jobs.submit(waiting.job)
    jobs.close()
    assert running.until_the_end()[-1] == waiting.until_the_end()[-1] == "cancelled"
    with pytest.raises(QueueFullError, match="while the server ends"):
        jobs.submit(Asker().job)
    jobs.close()

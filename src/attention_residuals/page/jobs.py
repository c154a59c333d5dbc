"""One model pass at a time: a bounded queue, in which what is newer replaces what still waits."""

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from attention_residuals.errors import AttentionResidualsError

__all__ = ["ENDS", "Cancelled", "Check", "Event", "Job", "Jobs", "QueueFullError", "Work", "told"]

Event = dict[str, Any]
"""What a job tells, as JSON can hold it; ``type`` says what it is."""

Check = Callable[[], None]
"""Raises ``Cancelled`` when nobody wants the result any more."""

Work = Callable[[Check], Iterator[Event]]
"""Computes: it calls the check now and then, and yields events, the last of type ``"done"``."""

ENDS = frozenset({"done", "error", "cancelled", "replaced"})
"""The types of events after which no other comes; every job tells exactly one of them."""


class Cancelled(Exception):  # noqa: N818 - no error
    """The result is not wanted any more."""


class QueueFullError(AttentionResidualsError, RuntimeError):
    """More requests than may wait."""


def told(error: AttentionResidualsError) -> Event:
    """Turns an error into an event.

    Example:
        >>> told(QueueFullError(got="a", expected="b", do="c"))
        {'type': 'error', 'got': 'a', 'expected': 'b', 'do': 'c'}
    """
    return {"type": "error", "got": error.got, "expected": error.expected, "do": error.do}


class Job:
    """Something to compute, and who is told about it.

    Args:
        owner: Who asked; a newer job of the same owner and kind replaces one that waits.
        kind: Of request.
        work: Computes.
        tell: Gets every event, from the thread in which it happens; must not block.
    """

    def __init__(self, *, owner: str, kind: str, work: Work, tell: Callable[[Event], None]) -> None:
        self.owner, self.kind, self.tell = owner, kind, tell
        self._work = work
        self.ended = False
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends it at its next check."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises ``Cancelled`` once it is cancelled."""
        if self._cancelled.is_set():
            raise Cancelled

    def run(self) -> None:
        """Computes, and tells what comes of it; an error that nobody foresaw is told and raised."""
        end: Event | None = {
            "type": "error",
            "got": "a fault in this program",
            "expected": "a result or a known error",
            "do": "see the terminal where attnres view runs, and report what it shows",
        }
        try:
            self.tell({"type": "started"})
            for event in self._work(self.check):
                self.check()
                self.ended = event["type"] in ENDS
                self.tell(event)
            end = None
        except Cancelled:
            end = {"type": "cancelled"}
        except AttentionResidualsError as error:
            end = told(error)
        finally:
            self.ended = True
            if end is not None:
                self.tell(end)


class Jobs:
    """Runs jobs one by one in a thread of its own.

    Those that wait are told ``{"type": "waiting", "ahead": n}`` whenever the number of jobs before them
    changes, the running one included.

    Args:
        max_waiting: Refuse more than so many that wait, 1 or more.

    Example:
        >>> import queue
        >>> events, jobs = queue.Queue(), Jobs()
        >>> jobs.submit(Job(owner="me", kind="sum", work=lambda check: iter([{"type": "done"}]), tell=events.put))
        >>> events.get(), events.get()
        ({'type': 'started'}, {'type': 'done'})
        >>> jobs.close()
    """

    def __init__(self, max_waiting: int = 8) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model pass")

    def submit(self, job: Job) -> None:
        """Lets a job wait for its turn, in the place of an older one of the same owner and kind.

        Raises:
            QueueFullError: Too many wait already, or the queue is closed.
        """
        with self._lock:
            if self._closed:
                raise QueueFullError(
                    got="a request while the server ends",
                    expected="a server that runs",
                    do="start attnres view again",
                )
            places = [(one.owner, one.kind) for one in self._waiting]
            if (job.owner, job.kind) in places:
                place = places.index((job.owner, job.kind))
                self._waiting[place].tell({"type": "replaced"})
                self._waiting[place] = job
                self._tell_places(from_place=place)
                return
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError(
                    got=f"a request behind {len(self._waiting)} that wait",
                    expected=f"at most {self._max_waiting}",
                    do="wait until one of them is done, or cancel some",
                )
            self._waiting.append(job)
            self._tell_places(from_place=len(self._waiting) - 1)
            # Still locked: once the queue is closed, the thread takes nothing more.
            self._thread.submit(self._run_next).add_done_callback(_show_fault)

    def cancel(self, chosen: Callable[[Job], bool]) -> int:
        """Drops the chosen jobs that wait, ends the running one at its next check, and counts both."""
        with self._lock:
            dropped = [job for job in self._waiting if chosen(job)]
            self._waiting = [job for job in self._waiting if job not in dropped]
            for job in dropped:
                job.tell({"type": "cancelled"})
            if dropped:
                self._tell_places()
            if self._running is None or not chosen(self._running):
                return len(dropped)
            self._running.cancel()
            return len(dropped) + 1

    def close(self) -> None:
        """Cancels all jobs, and returns when the running one has ended."""
        with self._lock:
            self._closed = True
        self.cancel(lambda job: True)
        self._thread.shutdown(wait=True)

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # it was cancelled
                return
            job = self._running = self._waiting.pop(0)
            self._tell_places()
        try:
            job.run()
        finally:
            with self._lock:
                self._running = None

    def _tell_places(self, from_place: int = 0) -> None:
        for place, job in enumerate(self._waiting[from_place:], from_place):
            if ahead := place + (self._running is not None and not self._running.ended):
                job.tell({"type": "waiting", "ahead": ahead})


def _show_fault(done: "Future[None]") -> None:
    if (fault := done.exception()) is not None:
        traceback.print_exception(fault)

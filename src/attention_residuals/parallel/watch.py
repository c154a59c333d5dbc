"""Who among the ranks still lives, and what it is doing: asked when a step does not come to its end."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from attention_residuals.errors import AttentionResidualsError, RankError

__all__ = ["BEAT_SECONDS", "PATIENCE_SECONDS", "Watch"]

BEAT_SECONDS = 0.5
"""How often a rank in a step says that it lives."""

PATIENCE_SECONDS = 5.0
"""How long a rank that failed waits for a word of the others; who says none in that time is named."""

_DONE = "between steps"


class _Word(NamedTuple):
    """What a rank last said of itself."""

    beat: int = 0
    step: int = 0
    doing: str = ""
    """Empty while it waits for other ranks."""
    seconds: float = 0.0
    """For how long."""
    turn: int = 0
    """How many passes it has begun; a step may take several, and all ranks begin as many."""
    verdict: str = ""
    """Why the step failed, once it knows."""


class Watch:
    """Tells the ranks of a group, apart from what they compute, who lives and what each is doing.

    In a step, a thread of each rank writes that into the store at which the ranks met. When an exchange fails,
    the ranks that are left read there who no longer writes (it died, or was stopped) or who is still busy while
    all others wait (it hangs). What the first of them finds, the others repeat: a rank that ends because another
    one died is not taken for the dead one.

    Args:
        group: The ranks; by default all. Every one of them makes a watch.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank()
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        self._store = PrefixStore("attention_residuals watch", _get_default_store())
        self._lock = threading.Lock()
        self._word = _Word()
        self._doing = ("", time.monotonic())
        self._say()

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Says that this rank lives, as long as a step runs, and names who ended it when it fails.

        Args:
            step: Its number, for the message.

        Raises:
            RankError: An exchange with other ranks failed.
        """
        self._doing = ("", time.monotonic())
        self._say(begins=step)
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
            self._doing = (_DONE, time.monotonic())
        except AttentionResidualsError:
            raise
        except RuntimeError as error:
            cause = error.__cause__
            if isinstance(cause, AttentionResidualsError):  # PyTorch wraps what a stage raises
                raise cause from None
            raise RankError(
                got=self._verdict(error),
                expected=f"every rank to finish the step; on rank {self.rank}: {_told(error)}",
                do="read what that rank wrote last, and start all again from the newest checkpoint",
            ) from error
        finally:
            ended.set()
            thread.join(BEAT_SECONDS)
            self._say()
            if self._word.verdict and self.rank == 0 and not dist.is_torchelastic_launched():
                self._wait_until_read()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Notes what this rank computes, as opposed to waiting; tells the others if it fails in it.

        Args:
            what: As the end of a sentence: "in the loss".
        """
        self._doing = (what, time.monotonic())
        try:
            yield
        except BaseException as error:
            step = self._word.step
            self._say(verdict=f"rank {self.rank} failed in step {step} {what}: {_told(error)}")
            raise
        self._doing = ("", time.monotonic())

    def _beat(self, ended: threading.Event) -> None:
        while self._others and not ended.wait(BEAT_SECONDS):
            self._say()

    def _say(self, begins: int | None = None, verdict: str | None = None) -> None:
        """Writes into the store; where that is gone, nobody could be told."""
        with self._lock:
            doing, since = self._doing
            now = self._word
            if begins is not None:
                now = now._replace(step=begins, turn=now.turn + 1, verdict="")
            if verdict is not None:
                now = now._replace(verdict=verdict)
            self._word = now._replace(beat=now.beat + 1, doing=doing, seconds=time.monotonic() - since)
            with contextlib.suppress(RuntimeError):
                self._store.set(_key(self.rank), json.dumps(self._word))

    def _verdict(self, error: RuntimeError) -> str:
        """Says who ended the step, and lets the others know."""
        if not self._word.verdict:
            try:
                found = self._asked()
            except RuntimeError:
                found = "the process that keeps the ranks' store no longer answers: rank 0, or torchrun"
            step = self._word.step
            self._say(verdict=found or f"rank {self.rank} failed in step {step}: {_told(error)}")
        return self._word.verdict

    def _asked(self) -> str:
        """Waits for a word of every other rank, and returns what follows; nothing if all are well."""
        step, turn, before, begin = self._word.step, self._word.turn, self._words(), time.monotonic()
        while True:
            now = self._words()
            for word in now.values():
                if word.verdict and word.turn == turn:
                    return word.verdict
            silent = [
                rank
                for rank, word in now.items()
                if word.beat < before[rank].beat + 2 and (word.turn, word.doing) != (turn, _DONE)
            ]
            if not silent or time.monotonic() - begin > PATIENCE_SECONDS:
                break
            time.sleep(BEAT_SECONDS / 5)
        if silent:
            return "; ".join(_silence(rank, now[rank], step) for rank in silent)
        busy = {rank: word for rank, word in now.items() if word.doing not in ("", _DONE)}
        if not busy:
            return ""
        rank = max(busy, key=lambda rank: busy[rank].seconds)
        word = busy[rank]
        return f"rank {rank} did not go on in step {step}: busy for {word.seconds:.0f} s {word.doing}"

    def _wait_until_read(self) -> None:
        """Stays a while: where no torchrun keeps the store, it ends with rank 0, and the verdict with it."""
        begin = time.monotonic()
        with contextlib.suppress(RuntimeError):
            while time.monotonic() - begin < PATIENCE_SECONDS and not all(
                word.verdict and word.turn == self._word.turn for word in self._words().values()
            ):
                time.sleep(BEAT_SECONDS / 5)

    def _words(self) -> dict[int, _Word]:
        """Reads what the other ranks said last."""
        found = {}
        for rank in self._others:
            said = self._store.check([_key(rank)])  # to get what is not there would wait
            found[rank] = _Word(*json.loads(self._store.get(_key(rank)))) if said else _Word()
        return found


def _key(rank: int) -> str:
    return f"rank {rank}"


def _silence(rank: int, word: _Word, step: int) -> str:
    """Says where a rank was when it was last heard of."""
    last = f"it was {word.doing or 'waiting for another rank'}" if word.beat else "it never began"
    return f"rank {rank} no longer answers in step {step}; when last heard of, in step {word.step}, {last}"


def _told(error: BaseException) -> str:
    """Says what failed: of what PyTorch wraps, what is inside."""
    inner = error.__cause__ or error
    return f"{type(inner).__name__}: {str(inner).strip()}"

"""How the ranks of a run tell one another that they ended, and find out which of them ended it for all."""

import json
import re
import time
from typing import Any

import torch.distributed as dist

from attention_residuals.errors import AttentionResidualsError, RankError

__all__ = ["RESTART", "SECONDS_TO_REPORT", "WaitedError", "blame", "line_of", "tell", "when"]

SECONDS_TO_REPORT = 10.0
"""How long a rank that was left waiting listens for what the others say about it."""

RESTART = "read what that rank wrote last; the same command goes on from the newest checkpoint"
"""What to do where the rank that failed has no advice of its own."""

_NOISE = re.compile(r"\[\S+\.cc:\d+\] |\. This is typically caused by .*")
"""What gloo says beside what has happened: a line of its source, and advice that does not hold here."""


class WaitedError(RuntimeError):
    """This rank did nothing but wait for another, which failed."""


def tell(error: BaseException, store: dist.Store, rank: int, step: int, *, began_here: bool) -> None:
    """Tells the others how this rank ended, and what its error says is to be done.

    Args:
        error: What ended it.
        store: What all ranks can read.
        rank: This one.
        step: In which it ended; 0 is before the first.
        began_here: It did not only wait for others.
    """
    told = {"step": step, "what": line_of(error), "began_here": began_here}
    if isinstance(error, AttentionResidualsError):
        told |= {"expected": error.expected, "do": error.do}
    store.set(f"failed/{rank}", json.dumps(told))


def blame(error: BaseException, store: dist.Store, rank: int, step: int) -> BaseException:
    """Listens to the others for a while.

    Args:
        error: What ended this rank, which waited for another.
        store: What all ranks write to.
        rank: This one.
        step: In which it waited.

    Returns:
        A RankError that names who ended the run, with the advice of its own error; the same error where nobody
        knows more.
    """
    others = [other for other in range(dist.get_world_size()) if other != rank]
    until, heard = time.monotonic() + SECONDS_TO_REPORT, dict[int, dict[str, Any]]()
    while time.monotonic() < until and len(heard) < len(others):
        for other in others:
            if other not in heard and store.check([f"failed/{other}"]):
                heard[other] = json.loads(store.get(f"failed/{other}"))
        if any(told["began_here"] for told in heard.values()):
            break
        time.sleep(0.05)
    guilty = {other: told for other, told in heard.items() if told["began_here"]}
    silent = [other for other in others if other not in heard]
    if guilty:
        said = [f"rank {other} failed {when(told['step'])}: {told['what']}" for other, told in guilty.items()]
    elif silent:
        said = [f"rank {other} gives no sign since {_last_sign(store, other)}" for other in silent]
    elif isinstance(error, RankError) or not heard:
        return error
    else:
        said = [f"rank {other} ended {when(told['step'])}: {told['what']}" for other, told in heard.items()]
    # What this rank ended with is told too: it may not have waited at all.
    ended = "" if isinstance(error, WaitedError) else f" and ended with {line_of(error)}"
    advice = next(iter(guilty.values()), {})
    return RankError(
        got=f"{'; '.join(said)} (rank {rank} waited for it {when(step)}{ended})",
        expected=advice.get("expected", "every rank to finish every step"),
        do=advice.get("do", RESTART),
    )


def line_of(error: BaseException) -> str:
    """Writes an error in one line.

    Example:
        >>> line_of(RuntimeError("[/src/tcp/pair.cc:553] Connection closed. This is typically caused by a worker."))
        'RuntimeError: Connection closed'
    """
    text = error.got if isinstance(error, AttentionResidualsError) else str(error)
    return f"{type(error).__name__}: {_NOISE.sub('', ' '.join(text.split()))[:500]}"


def when(step: int) -> str:
    """Says in which step something happened; 0 is before the first.

    Example:
        >>> when(0), when(3)
        ('before the first step', 'in step 3')
    """
    return f"in step {step}" if step else "before the first step"


def _last_sign(store: dist.Store, rank: int) -> str:
    key = f"step/{rank}"
    return f"step {store.get(key).decode()}" if store.check([key]) else "the start"

"""How the process of a run is started."""

import json
import sys
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from attention_residuals.configs import encode
from attention_residuals.parallel.config import Parallel

__all__ = ["Launcher", "OneProcess", "Torchrun"]

MODULE = "attention_residuals.experiments.worker"
"""What each process runs."""


@runtime_checkable
class Launcher(Protocol):
    """How the process of a run is started."""

    @property
    def device(self) -> str:
        """Where it trains."""
        ...

    def command(self) -> list[str]:
        """Returns the words before the worker's own."""
        ...


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """A run is one process with one thread.

    Args:
        device: Where it trains.

    Example:
        >>> OneProcess().command()[1:]
        ['-m', 'attention_residuals.experiments.worker']
    """

    device: str = "cpu"

    def command(self) -> list[str]:
        """Returns Python and the worker's module."""
        return [sys.executable, "-m", MODULE]


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """A run is several processes of this machine, which torchrun starts.

    torchrun exits with 1 whatever its processes said, so that each of them writes down how it ended, and a process
    that waits for all of them makes one outcome of it (``experiments.torchrun``).

    Args:
        parallel: How many ranks, and how they share the work.
        device: Where they train: ``"cpu"`` or ``"cuda"``, one GPU for each.

    Example:
        >>> Torchrun(parallel=Parallel(shard=8), device="cuda").command()[1:3]
        ['-m', 'attention_residuals.experiments.torchrun']
    """

    parallel: Parallel
    device: str = "cpu"

    def command(self) -> list[str]:
        """Returns Python, the module that is torchrun here, and how ranks share the work."""
        return [sys.executable, "-m", f"{__package__}.torchrun", json.dumps(encode(self.parallel))]

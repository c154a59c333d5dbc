"""How the process of a run is started."""

import sys
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Launcher", "OneProcess"]

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

    Not under torchrun, which hides how a run ended: it exits with 1 whatever its process said.

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

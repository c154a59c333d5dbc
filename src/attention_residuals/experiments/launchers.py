"""How the process of a run is started: alone, or by torchrun on several GPUs."""

import sys
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from attention_residuals.errors import ConfigError, is_count

__all__ = ["Launcher", "OneProcess", "TorchRun"]

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

    Example:
        >>> OneProcess().command()[1:]
        ['-m', 'attention_residuals.experiments.worker']
    """

    device: ClassVar[str] = "cpu"

    def command(self) -> list[str]:
        """Returns Python and the worker's module."""
        return [sys.executable, "-m", MODULE]


@dataclass(frozen=True, kw_only=True)
class TorchRun:
    """A run is started by torchrun, with as many processes as there are GPUs.

    Args:
        processes: Of one run on this machine, 1 or more.

    Raises:
        ConfigError: Fewer than one process.

    Example:
        >>> TorchRun(processes=8).command()[3:]
        ['--standalone', '--nproc-per-node', '8', '-m', 'attention_residuals.experiments.worker']
    """

    device: ClassVar[str] = "cuda"

    processes: int

    def __post_init__(self) -> None:
        if not is_count(self.processes):
            raise ConfigError(
                got=f"processes={self.processes}", expected="1 or more", do="pass the number of GPUs"
            )

    def command(self) -> list[str]:
        """Returns torchrun, its options and the worker's module."""
        options = ["--standalone", "--nproc-per-node", str(self.processes)]
        return [sys.executable, "-m", "torch.distributed.run", *options, "-m", MODULE]

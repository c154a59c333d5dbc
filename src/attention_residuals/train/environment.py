"""What a run ran on: versions, commit and hardware, without names of users or places."""

import os
import platform
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from attention_residuals.version import __version__

__all__ = ["describe", "git"]

SOURCE = Path(__file__).resolve()
PACKAGE = str(SOURCE.parents[1])


def describe() -> dict[str, Any]:
    """Describes this process for a run's environment.json.

    Paths on the command line that could name a user are cut to their last part.

    Example:
        >>> describe()["torch"] == torch.__version__
        True
    """
    # Of this package's own source, and not of a repository that it merely happens to be installed inside.
    place = SOURCE.parent
    is_ours = git(place, "ls-files", "--error-unmatch", SOURCE.name)
    commit = git(place, "rev-parse", "HEAD") if is_ours else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attention_residuals": __version__,
        "git_commit": commit,
        "git_clean": None if commit is None else not git(place, "status", "--porcelain", "--", PACKAGE),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "command": [_without_place(argument) for argument in sys.argv],
    }


def git(folder: Path, *arguments: str, timeout: float = 10.0) -> str | None:
    """Runs git, and returns what it says, or None where it fails, is missing or takes too long.

    Args:
        folder: Where to run it.
        arguments: Its command and options.
        timeout: Seconds that it may take.

    Example:
        >>> git(Path("/"), "no-such-command") is None
        True
    """
    try:
        ran = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _without_place(argument: str) -> str:
    return "=".join(_last_part(piece) for piece in argument.split("="))


def _last_part(piece: str) -> str:
    posix, windows = PurePosixPath(piece), PureWindowsPath(piece)
    if posix.is_absolute() or piece.startswith(("~", "..")):
        return posix.name
    return windows.name if windows.drive else piece

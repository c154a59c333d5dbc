"""Files that outlast a kill or a power cut: written beside their place, made safe, then renamed."""

import os
import shutil
from pathlib import Path

from attention_residuals.errors import CheckpointError

__all__ = ["PARTIAL", "remove_partials", "sync", "write_bytes", "write_new"]

PARTIAL = ".partial-"
"""How the names of half-written files and folders begin."""


def sync(path: Path) -> None:
    """Makes a file's bytes, or the names in a folder, outlast a power cut."""
    if os.name == "nt" and path.is_dir():  # pragma: no cover  Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, or writes over one, whole or not at all.

    Raises:
        OSError: It cannot be written; nothing half-written is left.
    """
    partial = path.with_name(PARTIAL + path.name)
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that does not exist yet, whole or not at all; makes its folder.

    Raises:
        CheckpointError: The file exists, or cannot be written.
    """
    if path.exists():
        raise CheckpointError(got=f"{path} exists", expected="a new file", do="name another, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except OSError as error:
        raise CheckpointError(
            got=f"{error} while writing {path}",
            expected="a writable disk with room",
            do="free some space or name another folder",
        ) from error


def remove_partials(folder: Path) -> None:
    """Removes what a killed process left half-written in a folder."""
    for path in folder.glob(f"{PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

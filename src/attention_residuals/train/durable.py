"""Files that outlast a kill or a power cut: written beside their place, made safe, then renamed."""

import os
import shutil
from pathlib import Path

__all__ = ["PARTIAL", "remove_partials", "sync", "write_text"]

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


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(PARTIAL + path.name)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def remove_partials(folder: Path) -> None:
    """Removes what a killed process left half-written in a folder."""
    for path in folder.glob(f"{PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

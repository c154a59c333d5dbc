"""Files that outlast a kill or a power cut: written beside their place, made safe, then renamed.

And a lock that does not: it ends with the process that holds it, so that no kill leaves anything locked.
"""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attention_residuals.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

__all__ = ["PARTIAL", "advice", "locked", "remove_partials", "sync", "unwritable", "write_bytes", "write_new"]

PARTIAL = ".partial-"
"""How the names of half-written files and folders begin."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_TAKEN = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}


def advice(error: Exception) -> tuple[str, str]:
    """Says what a write that failed would have needed, and what to do about it.

    Args:
        error: What the write raised: an OSError, or one whose text ends in "(os error 28)".

    Returns:
        What was expected, and what to do.

    Example:
        >>> advice(OSError(errno.ENOSPC, "No space left on device"))
        ('a disk with room', 'free some space, or name a folder on another disk')
    """
    # What is written in Rust (safetensors) tells the number in its text.
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    if number in _FULL:
        return "a disk with room", "free some space, or name a folder on another disk"
    if number in _FORBIDDEN:
        return "a place that may be written to", "change its permissions, or name another folder"
    if number in _TAKEN:
        return (
            "a folder where a folder is needed, and a file where a file is",
            "move away what has that name, or name another folder",
        )
    if number == errno.ENOENT:
        return (
            "a folder that stays there while it is written to",
            "see who removed it, or name another folder",
        )
    return "a disk that takes the write", "see the cause above, or name another folder"


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """Makes the error of a write that failed, with the advice that its cause calls for."""
    expected, do = advice(error)
    return CheckpointError(got=f"{error} while writing {path}", expected=expected, do=do)


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
    # A name of its own, so that two processes that write the same file do not write into one another.
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
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
        raise unwritable(path, error) from error


def remove_partials(folder: Path) -> None:
    """Removes what a killed process left half-written in a folder."""
    for path in folder.glob(f"{PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Holds a lock file until the block ends.

    The system lets go of the lock when the process ends, however it ends. The file itself stays. On Windows, where
    there is no such lock, it is always had: run one queue at a time there.

    Args:
        path: Of the lock file; is made with its folder.
        wait: Until whoever holds it lets go; else be told at once.

    Returns:
        Whether this process holds it now.

    Raises:
        CheckpointError: The file cannot be made.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.lock"
        >>> with locked(path) as first, locked(path) as second:
        ...     print(first, second)
        True False
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True

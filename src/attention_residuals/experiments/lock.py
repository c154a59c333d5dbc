"""A lock that dies with the process that holds it, so that no kill leaves anything locked."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attention_residuals.durable import unwritable

if sys.platform != "win32":
    import fcntl

__all__ = ["locked"]


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

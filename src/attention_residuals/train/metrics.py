"""The rows of a run's metrics.jsonl: checked when read, and exactly those of the checkpoint when going on."""

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attention_residuals.durable import remove_partials, sync, unwritable
from attention_residuals.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

__all__ = ["NO_ROWS", "Extent", "Metrics", "Row", "Rows", "is_extent", "read_rows"]

Row = dict[str, Any]

_NUMBERS = {
    "train": {"tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds"},
    "valid": {"tokens", "loss", "bits_per_byte"},
}
"""What a row of each split has; a row of training has ``bits_per_byte`` only where a target has bytes."""


class Extent(NamedTuple):
    """How much of metrics.jsonl was there when a checkpoint was made, and what it was."""

    bytes: int
    sha256: str


NO_ROWS = Extent(bytes=0, sha256=hashlib.sha256().hexdigest())


def is_extent(value: Any) -> bool:
    """Tells whether what JSON holds is an ``Extent`` and not a garbled one.

    Example:
        >>> is_extent(NO_ROWS._asdict()), is_extent({"bytes": -1, "sha256": ""})
        (True, False)
    """
    return (
        isinstance(value, dict)
        and value.keys() == set(Extent._fields)
        and type(value["bytes"]) is int
        and value["bytes"] >= 0
        and isinstance(value["sha256"], str)
    )


class Rows:
    """The rows of a run as a process keeps them that does not write them: another rank does.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows: list[Row] = []

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *error: object) -> None:
        """Has nothing to close."""

    def cut(self, extent: Extent) -> None:
        """Takes the rows that a checkpoint knew; whoever writes them checks that they are as they were."""
        content = self.path.read_bytes() if self.path.exists() else b""
        self.rows = _parse(self.path, content[: extent.bytes])

    def append(self, row: Row) -> None:
        """Adds a row."""
        self.rows.append(row)

    def last(self, split: str, what: str) -> float | None:
        """Returns a number of the last row of a split, or None where there is no such row."""
        return next((row[what] for row in reversed(self.rows) if row["split"] == split), None)

    def sync(self) -> Extent:
        """Has nothing to make safe."""
        return NO_ROWS


class Metrics(Rows):
    """The rows of metrics.jsonl, open for this process alone.

    As soon as no other process can be writing, what a killed one left half-written is cleared away.

    Args:
        folder: Of the run; is made if it does not exist.

    Raises:
        CheckpointError: Another process trains in this folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._num_bytes, self._digest = 0, hashlib.sha256()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            if sys.platform != "win32":
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_partials(folder)
            remove_partials(folder / "checkpoints")
        except BlockingIOError as error:
            self._file.close()
            raise CheckpointError(
                got=f"{folder}, in which another process is training",
                expected="one process at a time",
                do="wait until it ends, or name another folder",
            ) from error
        except OSError as error:
            raise unwritable(self.path, error) from error

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def cut(self, extent: Extent) -> None:
        """Keeps the rows that a checkpoint knew, and drops what a killed process wrote after it.

        Raises:
            CheckpointError: These rows are not there any more as they were; nothing is cut.
        """
        self._file.seek(0)
        content = self._file.read()
        kept = content[: extent.bytes]
        self._digest = hashlib.sha256(kept)
        if len(kept) != extent.bytes or self._digest.hexdigest() != extent.sha256:
            raise CheckpointError(
                got=f"{self.path} of {len(content)} bytes, in which rows from before the checkpoint are "
                + ("missing" if len(content) < extent.bytes else "changed"),
                expected=f"{extent.bytes} bytes of sha256 {extent.sha256} at its beginning",
                do="copy the file again if you have it elsewhere, or train into a new folder; "
                "the checkpoint's model is good, and load_checkpoint_model reads it",
            )
        self._num_bytes = len(kept)
        self.rows = _parse(self.path, kept)
        self._file.truncate(len(kept))

    def append(self, row: Row) -> None:
        """Adds a row.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError("only a part of the row went through")
        except OSError as error:
            raise unwritable(self.path, error) from error
        super().append(row)
        self._num_bytes += len(line)
        self._digest.update(line)

    def sync(self) -> Extent:
        """Makes the rows outlast a power cut, which they must before the checkpoint of their step does.

        Returns:
            What the checkpoint has to remember of them.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        try:
            sync(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return Extent(bytes=self._num_bytes, sha256=self._digest.hexdigest())


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a run that may still be going on; there are none where there is no file yet.

    Raises:
        CheckpointError: The file cannot be read, or a row lacks its numbers.
    """
    try:
        return _parse(path, path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            got=f"{path}: {error}", expected="a file that may be read", do="check what lies there"
        ) from error


def _parse(path: Path, content: bytes) -> list[Row]:
    """Reads rows; a last line without an end is being written, or was when the process was killed."""
    rows = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        wrong = _wrong(row)
        if wrong is not None:
            raise CheckpointError(
                got=f"{path}, line {number}, {wrong}: {line[:60]!r}",
                expected="a row as train writes it, with its split, step and numbers",
                do="copy the file again if you have it elsewhere",
            )
        rows.append(dict(row))
    return rows


def _wrong(row: Any) -> str | None:
    """Says what a row lacks, or returns None."""
    if not isinstance(row, Mapping):
        return "which is no JSON object"
    if type(row.get("step")) is not int or row.get("split") not in ("train", "valid"):
        return "which names no step of a split"
    numbers = _NUMBERS[row["split"]] | ({"bits_per_byte"} if row.get("bits_per_byte") is not None else set())
    bad = sorted(name for name in numbers if not _is_number(row.get(name)))
    return f"which has no number as {', '.join(bad)}" if bad else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

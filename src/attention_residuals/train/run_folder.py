"""The folder of one run: its config, its environment, its metrics, and nothing of any other run."""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_residuals.configs import decode, encode
from attention_residuals.data import Corpus
from attention_residuals.durable import PARTIAL, remove_partials, sync, write_bytes
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.models.weights import read_json
from attention_residuals.train.config import TRAIN_CONFIGS, TrainConfig, first_difference
from attention_residuals.train.environment import describe

if sys.platform != "win32":
    import fcntl

__all__ = ["Metrics", "Run", "claim", "load_run", "record_start"]

FORMAT = 1
"""Of config.json and environment.json; raised when an older version could not read them."""

DECIDES_BITS = ("torch", "device", "cpu_capability", "threads")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder tells it.

    Args:
        folder: Where it lies.
        config: What it was started with.
        metrics: The rows of metrics.jsonl, in order.
    """

    folder: Path
    config: TrainConfig
    metrics: tuple[Row, ...]


def load_run(folder: Path | str) -> Run:
    """Reads a run's config and metrics; ``load_checkpoint_model`` reads its model.

    Raises:
        CheckpointError: The folder holds no run, or a file is damaged or of a newer format.
    """
    folder = Path(folder)
    description = read_json(folder / "config.json", newest=FORMAT)
    try:
        config = decode(description.get("train"), TRAIN_CONFIGS)
    except ConfigError as error:
        raise _no_run(folder, error.got) from error
    if not isinstance(config, TrainConfig):
        raise _no_run(folder, "no TrainConfig")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return Run(folder=folder, config=config, metrics=tuple(_parse(path, lines)))


def claim(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Makes a new folder this run's, or checks that it is this run's already.

    Raises:
        CheckpointError: It holds another run or something else, or cannot be written.
    """
    # What decides the tokens; not where the text lay when the corpus was prepared.
    tokens = {name: corpus.manifest[name] for name in ("splits", "tokenizer_sha256")}
    digest = hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()
    ours = {"format": FORMAT, "train": encode(config), "corpus": {"sha256": digest}}
    path = folder / "config.json"
    if path.exists():
        there = read_json(path, newest=FORMAT)
        difference = first_difference(there, json.loads(json.dumps(ours)))
        if difference is not None:
            raise CheckpointError(
                got=f"{folder}, which holds another run: {difference.removeprefix('train.')}",
                expected="a new folder, or the config and corpus that the run in it began with",
                do="name another folder, or correct the config",
            )
        return
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not name.startswith(PARTIAL)]
    if foreign:
        raise CheckpointError(
            got=f"{folder}, which holds {foreign[0]!r} and no run",
            expected="a new or empty folder, or the folder of this run",
            do="name another folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, (json.dumps(ours, indent=2) + "\n").encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def record_start(folder: Path, corpus: Corpus, *, step: int, seed: int, device: str) -> list[str]:
    """Adds what this process runs on to environment.json.

    The tokenizer is copied, so that a run can be read without its corpus.

    Returns:
        What is not as it was at the first start, of what decides the last bits.

    Raises:
        CheckpointError: The file is damaged or cannot be written.
    """
    path = folder / "environment.json"
    starts = read_json(path, newest=FORMAT)["starts"] if path.exists() else []
    starts.append({"from_step": step, "seed": seed, "device": device, **describe()})
    try:
        write_bytes(folder / "tokenizer.json", corpus.tokenizer.to_json().encode())
        write_bytes(path, (json.dumps({"format": FORMAT, "starts": starts}, indent=2) + "\n").encode())
    except OSError as error:
        raise _unwritable(path, error) from error
    first, now = starts[0], starts[-1]
    return [f"{name} {first[name]}, now {now[name]}" for name in DECIDES_BITS if first[name] != now[name]]


class Metrics:
    """The rows of metrics.jsonl, open for this process alone.

    As soon as no other process can be writing, what a killed one left half-written is cleared away.

    Args:
        folder: Of the run.

    Raises:
        CheckpointError: Another process trains in this folder, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows: list[Row] = []
        try:
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
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def cut(self, step: int) -> None:
        """Keeps the rows up to a step, and drops later ones and a last one that was not finished.

        Raises:
            CheckpointError: A row is damaged.
        """
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        rows = _parse(self.path, lines)
        self.rows = [row for row in rows if row["step"] <= step]
        self._file.truncate(sum(len(line) for line in lines[: len(self.rows)]))

    def append(self, row: Row) -> None:
        """Adds a row.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        self.rows.append(row)
        try:
            if self._file.write(line) < len(line):
                raise OSError("only a part of the row went through")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def last(self, split: str, what: str) -> float | None:
        """Returns a number of the last row of a split, or None where there is no such row."""
        return next((row[what] for row in reversed(self.rows) if row.get("split") == split), None)

    def sync(self) -> None:
        """Makes the rows outlast a power cut, which they must before the checkpoint of their step does."""
        sync(self.path)


def _parse(path: Path, lines: list[bytes]) -> list[Row]:
    """Reads rows; a last line without an end was being written when the process was killed."""
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, Mapping) or not isinstance(row.get("step"), int):
            raise CheckpointError(
                got=f"{path}, line {number}: {line[:60]!r}",
                expected="a JSON object with a step",
                do="remove that line if it holds nothing, or restore the file",
            )
        rows.append(dict(row))
    return rows


def _no_run(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        got=f"{folder / 'config.json'}: {why}",
        expected="the config.json of a run",
        do="name a folder that train wrote",
    )


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        got=f"{path} could not be written: {error}",
        expected="a writable disk with room",
        do="free some space and start again with the same command; saved checkpoints are safe",
    )

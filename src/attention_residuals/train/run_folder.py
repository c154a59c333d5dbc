"""The folder of one run: its config, its environment, its metrics, and nothing of any other run."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_residuals.configs import decode, encode
from attention_residuals.data import Corpus
from attention_residuals.durable import PARTIAL, unwritable, write_bytes
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.models.weights import read_json, sha256
from attention_residuals.train.config import TRAIN_CONFIGS, TrainConfig, first_difference
from attention_residuals.train.environment import describe
from attention_residuals.train.metrics import Row, read_rows

__all__ = ["Run", "check_folder", "claim", "identity", "load_run", "record_start"]

FORMAT = 1
"""Of config.json and environment.json; raised when an older version could not read them."""

DECIDES_BITS = ("torch", "device", "cpu_capability", "threads")

RANKS = "parallel"
"""How many processes train together, and how; only of runs of several."""


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
    return Run(folder=folder, config=config, metrics=tuple(read_rows(folder / "metrics.jsonl")))


def identity(config: TrainConfig, corpus: Corpus, start: Path | None = None) -> dict[str, Any]:
    """Returns what makes a run this run: the content of its config.json."""
    # What decides the tokens; not where the text lay when the corpus was prepared.
    tokens = {name: corpus.manifest[name] for name in ("splits", "tokenizer_sha256")}
    digest = hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()
    ours = {"format": FORMAT, "train": encode(config), "corpus": {"sha256": digest}}
    return ours if start is None else {**ours, "start": {"sha256": sha256(start / "model.safetensors")}}


def check_folder(folder: Path, ours: dict[str, Any]) -> None:
    """Checks that a folder is new, empty or of this very run, and writes nothing.

    Raises:
        CheckpointError: It holds another run or something else, or cannot be read.
    """
    path = folder / "config.json"
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        # A process that was killed at once, or that starts at this moment, has its empty metrics.jsonl there.
        foreign = [
            entry.name
            for entry in entries
            if not entry.name.startswith(PARTIAL)
            and not (entry.name == "metrics.jsonl" and entry.stat().st_size == 0)
        ]
        is_run = path.exists()  # asked last: what another process makes at this moment then counts as a run
    except OSError as error:
        raise unwritable(path, error) from error
    if is_run:
        difference = first_difference(read_json(path, newest=FORMAT), json.loads(json.dumps(ours)))
        if difference is not None:
            raise CheckpointError(
                got=f"{folder}, which holds another run: {difference.removeprefix('train.')}",
                expected="a new folder, or the config and corpus that the run in it began with",
                do="name another folder, or correct the config",
            )
    elif foreign:
        raise CheckpointError(
            got=f"{folder}, which holds {foreign[0]!r} and no run",
            expected="a new or empty folder, or the folder of this run",
            do="name another folder",
        )


def claim(folder: Path, ours: dict[str, Any]) -> None:
    """Makes a new folder this run's, or checks that it is this run's already.

    To be called with its ``Metrics`` open, so that of two processes only one can make it its own.

    Raises:
        CheckpointError: It holds another run or something else, or cannot be written.
    """
    check_folder(folder, ours)
    path = folder / "config.json"
    if not path.exists():
        try:
            write_bytes(path, (json.dumps(ours, indent=2) + "\n").encode())
        except OSError as error:
            raise unwritable(path, error) from error


def record_start(
    folder: Path, corpus: Corpus, *, step: int, seed: int, device: str, ranks: dict[str, Any]
) -> list[str]:
    """Adds what this process runs on to environment.json, and how many others with it.

    The tokenizer is copied, so that a run can be read without its corpus.

    Returns:
        What is not as it was at the first start, of what decides the last bits.

    Raises:
        CheckpointError: The file is damaged or cannot be written.
    """
    path = folder / "environment.json"
    starts = _starts(path) if path.exists() else []
    starts.append({"from_step": step, "seed": seed, "device": device, **ranks, **describe()})
    try:
        write_bytes(folder / "tokenizer.json", corpus.tokenizer.to_json().encode())
        write_bytes(path, (json.dumps({"format": FORMAT, "starts": starts}, indent=2) + "\n").encode())
    except OSError as error:
        raise unwritable(path, error) from error
    first, now = starts[0], starts[-1]
    return [
        f"{name} {first.get(name)}, now {now.get(name)}"
        for name in (*DECIDES_BITS, RANKS)
        if first.get(name) != now.get(name)
    ]


def _starts(path: Path) -> list[dict[str, Any]]:
    starts = read_json(path, newest=FORMAT).get("starts")
    whole = isinstance(starts, list) and all(
        isinstance(start, dict) and start.keys() >= set(DECIDES_BITS) for start in starts
    )
    if not isinstance(starts, list) or not starts or not whole:
        raise CheckpointError(
            got=f"{path}, whose starts are garbled or missing",
            expected=f'"starts": a list of what each start ran on, with its {", ".join(DECIDES_BITS)}',
            do="copy the file again if you have it elsewhere; or move it away, and its history begins anew",
        )
    return starts


def _no_run(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        got=f"{folder / 'config.json'}: {why}",
        expected="the config.json of a run",
        do="name a folder that train wrote",
    )

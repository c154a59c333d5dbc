"""Checkpoints of a run: complete or not there, verified when read, the last few kept."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from attention_residuals.configs import encode
from attention_residuals.durable import PARTIAL, remove_partials, sync, unwritable
from attention_residuals.errors import CheckpointError, NewerFormatError
from attention_residuals.models import LanguageModel, load_model, save_model
from attention_residuals.models.weights import load_state, load_tensors, read_json, sha256
from attention_residuals.train.config import TrainConfig, first_difference
from attention_residuals.train.metrics import Extent
from attention_residuals.train.optimizer import Optimizer

__all__ = ["checkpoints", "load_checkpoint_model", "newest_checkpoint", "restore", "save_checkpoint"]

FORMAT = 1
"""Of state.json; raised when an older version of this package could not read it."""

FILES = ("config.json", "model.safetensors", "optimizer.safetensors")


def checkpoints(run_folder: Path) -> list[Path]:
    """Lists the folders of a run's checkpoints, oldest first, without looking into them."""
    found = (run_folder / "checkpoints").glob("step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8,}", path.name))


def save_checkpoint(
    run_folder: Path,
    *,
    step: int,
    model: LanguageModel,
    optimizer: Optimizer,
    config: TrainConfig,
    metrics: Extent,
    keep: int,
) -> Path:
    """Writes a checkpoint and then removes all but the last ``keep``.

    The newest checkpoint knows which rows of metrics.jsonl belong to it, so that lost rows are noticed.

    Raises:
        CheckpointError: The disk is full or not writable; earlier checkpoints are untouched.
    """
    folder = run_folder / "checkpoints"
    final = folder / f"step-{step:08d}"
    partial = folder / f"{PARTIAL}{final.name}"
    try:
        folder.mkdir(exist_ok=True)
        remove_partials(folder)
        save_model(model, partial)
        state = {name: tensor.contiguous() for name, tensor in optimizer.tensors().items()}
        save_file(state, partial / "optimizer.safetensors")
        description = {
            "format": FORMAT,
            "step": step,
            "sha256": {name: sha256(partial / name) for name in FILES},
            "config": encode(config),
            "metrics": metrics._asdict(),
        }
        (partial / "state.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(final)
        sync(folder)
        for old in checkpoints(run_folder)[:-keep]:
            # Renamed first, so that a kill in the middle leaves nothing that looks like a checkpoint.
            shutil.rmtree(old.rename(old.with_name(f"{PARTIAL}{old.name}")))
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = error if isinstance(error, CheckpointError) else unwritable(final, error)
        raise CheckpointError(
            got=f"{cause.got}, at step {step}",
            expected=cause.expected,
            do=f"{cause.do}; then start again: {last_saved(run_folder)}",
        ) from error
    return final


def newest_checkpoint(run_folder: Path, config: TrainConfig | None = None) -> Path | None:
    """Returns the newest checkpoint after verifying it, or None where there is none.

    Args:
        run_folder: Of the run.
        config: What the checkpoint must have been made with; None accepts any.

    Raises:
        NewerFormatError: The newest one is of a newer format.
        CheckpointError: The newest one is damaged or of another config. For a damaged one an older one is
            named where a good one is left, and never taken silently.
    """
    saved = checkpoints(run_folder)
    if not saved:
        return None
    try:
        state = _verified(saved[-1])
    except NewerFormatError:
        raise
    except CheckpointError as error:
        good = next((path for path in reversed(saved[:-1]) if _is_good(path, config)), None)
        choice = (
            "no good checkpoint is left: to start from the beginning, name another folder"
            if good is None
            else f"the newest good one is {good}: to go on from it, "
            "move every later one out of the run's folder, and start again"
        )
        raise CheckpointError(got=error.got, expected=error.expected, do=f"{error.do}; {choice}") from error
    difference = _difference(state, config)
    if difference is not None:
        raise CheckpointError(
            got=f"{saved[-1]} of another config: {difference}",
            expected="a checkpoint of this very run",
            do="correct the config, or name another folder",
        )
    return saved[-1]


def restore(checkpoint: Path, model: LanguageModel, optimizer: Optimizer) -> tuple[int, Extent]:
    """Puts a verified checkpoint's bits into model and optimizer.

    Returns:
        Its step, and what was in metrics.jsonl by then.

    Raises:
        CheckpointError: The tensors do not fit.
    """
    state = read_json(checkpoint / "state.json", newest=FORMAT)
    weights, moments = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"
    load_state(model, load_tensors(weights, sha256_expected=state["sha256"][weights.name]), weights)
    optimizer.load(load_tensors(moments, sha256_expected=state["sha256"][moments.name]), moments)
    return int(state["step"]), Extent(**state["metrics"])


def load_checkpoint_model(run_folder: Path | str) -> LanguageModel:
    """Reads the model of a run's newest checkpoint.

    Args:
        run_folder: Of the run, or the folder that ``attnres train`` wrote, which holds it as ``run``.

    Raises:
        CheckpointError: There is no checkpoint, or the newest one is damaged.
    """
    inner = Path(run_folder) / "run"
    checkpoint = newest_checkpoint(inner if inner.is_dir() else Path(run_folder))
    if checkpoint is None:
        raise CheckpointError(
            got=f"{run_folder} without a checkpoint", expected="a run folder", do="train first"
        )
    return load_model(checkpoint)


def last_saved(run_folder: Path) -> str:
    """Says in words which checkpoint a run can go on from."""
    saved = checkpoints(run_folder)
    return f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"


def _is_good(checkpoint: Path, config: TrainConfig | None) -> bool:
    try:
        return _difference(_verified(checkpoint), config) is None
    except CheckpointError:
        return False


def _difference(state: dict[str, Any], config: TrainConfig | None) -> str | None:
    return None if config is None else first_difference(state.get("config"), encode(config))


def _verified(checkpoint: Path) -> dict[str, Any]:
    """Returns a checkpoint's state.json once it and every file that it names are found undamaged."""
    path = checkpoint / "state.json"
    state = read_json(path, newest=FORMAT)
    wrong = [name for name, is_whole in _WHOLE.items() if not is_whole(state.get(name))]
    if wrong or checkpoint.name != f"step-{state['step']:08d}":
        raise CheckpointError(
            got=f"{path}, which garbles {', '.join(wrong) or 'its step: ' + str(state['step'])}",
            expected="the step in the folder's name, and a checksum for each file",
            do="copy it again if you have it elsewhere",
        )
    for name in FILES:
        file = checkpoint / name
        if not file.is_file() or sha256(file) != state["sha256"].get(name):
            raise CheckpointError(
                got=f"{file}, which is {'truncated or changed' if file.is_file() else 'missing'}",
                expected=f"sha256 {state['sha256'].get(name)}",
                do="copy it again if you have it elsewhere",
            )
    return state


def _is_extent(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(Extent._fields)
        and type(value["bytes"]) is int
        and value["bytes"] >= 0
        and isinstance(value["sha256"], str)
    )


_WHOLE: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int,
    "sha256": lambda value: isinstance(value, dict),
    "config": lambda value: isinstance(value, dict),
    "metrics": _is_extent,
}
"""What state.json holds, and how each part is told from a garbled one."""

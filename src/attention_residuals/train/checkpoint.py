"""Checkpoints of a run: complete or not there, verified when read, the last few kept."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from attention_residuals.configs import encode
from attention_residuals.durable import PARTIAL, remove_partials, sync
from attention_residuals.errors import CheckpointError
from attention_residuals.models import Decoder, load_model, save_model
from attention_residuals.models.weights import load_state, load_tensors, read_json, sha256
from attention_residuals.train.config import TrainConfig, first_difference
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
    run_folder: Path, *, step: int, model: Decoder, optimizer: Optimizer, config: TrainConfig, keep: int
) -> Path:
    """Writes a checkpoint and then removes all but the last ``keep``.

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
        raise CheckpointError(
            got=f"{error.got if isinstance(error, CheckpointError) else error}, at step {step}",
            expected="a writable disk with room for one more checkpoint",
            do=f"free some space and start again: {last_saved(run_folder)}",
        ) from error
    return final


def newest_checkpoint(run_folder: Path, config: TrainConfig | None = None) -> Path | None:
    """Returns the newest checkpoint after verifying it, or None where there is none.

    Args:
        run_folder: Of the run.
        config: What the checkpoint must have been made with; None accepts any.

    Raises:
        CheckpointError: The newest one is damaged, of a newer format or of another config. An older one is
            named where a good one is left, and never taken silently.
    """
    saved = checkpoints(run_folder)
    if not saved:
        return None
    try:
        _verify(saved[-1], config)
    except CheckpointError as error:
        good = next((path for path in reversed(saved[:-1]) if _is_good(path, config)), None)
        advice = (
            f"no good checkpoint is left: remove {saved[-1]} to start from the beginning"
            if good is None
            else f"the newest good one is {good}: to go on from it, remove every later one, and start again"
        )
        raise CheckpointError(got=error.got, expected=error.expected, do=f"{error.do}; {advice}") from error
    return saved[-1]


def restore(checkpoint: Path, model: Decoder, optimizer: Optimizer) -> int:
    """Puts a verified checkpoint's bits into model and optimizer, and returns its step.

    Raises:
        CheckpointError: The tensors do not fit.
    """
    state = read_json(checkpoint / "state.json", newest=FORMAT)
    weights, moments = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"
    load_state(model, load_tensors(weights, sha256_expected=state["sha256"][weights.name]), weights)
    optimizer.load(load_tensors(moments, sha256_expected=state["sha256"][moments.name]), moments)
    return int(state["step"])


def load_checkpoint_model(run_folder: Path | str) -> Decoder:
    """Reads the model of a run's newest checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or the newest one is damaged.
    """
    checkpoint = newest_checkpoint(Path(run_folder))
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
        _verify(checkpoint, config)
    except CheckpointError:
        return False
    return True


def _verify(checkpoint: Path, config: TrainConfig | None) -> None:
    path = checkpoint / "state.json"
    state: dict[str, Any] = read_json(path, newest=FORMAT)
    sums = state.get("sha256")
    if checkpoint.name != f"step-{state.get('step')!s:0>8}" or not isinstance(sums, dict):
        raise CheckpointError(
            got=f"{path} with step {state.get('step')} and checksums {type(sums).__name__}",
            expected="the step in the folder's name, and a checksum for each file",
            do="the file is changed: copy it again",
        )
    for name in FILES:
        file = checkpoint / name
        if not file.is_file() or sha256(file) != sums.get(name):
            raise CheckpointError(
                got=f"{file}, which is {'truncated or changed' if file.is_file() else 'missing'}",
                expected=f"sha256 {sums.get(name)}",
                do="copy it again if you have it elsewhere",
            )
    difference = None if config is None else first_difference(state.get("config"), encode(config))
    if difference is not None:
        raise CheckpointError(
            got=f"{checkpoint} of another config: {difference}",
            expected="a checkpoint of this very run",
            do="restore the config, or train into a new folder",
        )

"""Checkpoints of a run: complete or not there, verified when read, the last few kept."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from attention_residuals.configs import encode
from attention_residuals.durable import PARTIAL, remove_partials, sync, unwritable
from attention_residuals.errors import CheckpointError, NewerFormatError
from attention_residuals.models import LanguageModel, build, load_model, save_model
from attention_residuals.models.weights import load_config, load_state, load_tensors, read_json, sha256
from attention_residuals.train.config import TrainConfig, first_difference
from attention_residuals.train.metrics import Extent, is_extent
from attention_residuals.train.optimizer import Optimizer
from attention_residuals.train.shards import SHARDED, WHOLE, is_shard, is_sharded, read_parts

__all__ = [
    "checkpoints",
    "complete",
    "is_sharded",
    "load_checkpoint",
    "load_checkpoint_model",
    "newest_checkpoint",
    "partial_of",
    "position",
    "restore",
    "save_checkpoint",
    "step_of",
    "writing",
]

FILES = ("config.json", "model.safetensors", "optimizer.safetensors")


def checkpoints(run_folder: Path) -> list[Path]:
    """Lists the folders of a run's checkpoints, oldest first, without looking into them."""
    found = (run_folder / "checkpoints").glob("step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8,}", path.name))


def step_of(checkpoint: Path) -> int:
    """Reads a checkpoint's step from its folder's name, without looking into it.

    Args:
        checkpoint: One of ``checkpoints``.

    Example:
        >>> step_of(Path("run/checkpoints/step-00000250"))
        250
    """
    return int(checkpoint.name.removeprefix("step-"))


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
    partial = partial_of(run_folder, step)
    with writing(run_folder, step):
        save_model(model, partial)
        state = {name: tensor.contiguous() for name, tensor in optimizer.tensors().items()}
        save_file(state, partial / "optimizer.safetensors")
        digests = {name: sha256(partial / name) for name in FILES}
        return complete(
            run_folder, step=step, digests=digests, config=config, metrics=metrics, keep=keep, form=WHOLE
        )


def partial_of(run_folder: Path, step: int) -> Path:
    """Names the folder of a step's checkpoint while it is being written."""
    return run_folder / "checkpoints" / f"{PARTIAL}step-{step:08d}"


@contextmanager
def writing(run_folder: Path, step: int) -> Iterator[None]:
    """Clears the place for a step's checkpoint; says in words why it cannot be written, and removes the half of it.

    Raises:
        CheckpointError: The disk is full or not writable; earlier checkpoints are untouched.
    """
    partial = partial_of(run_folder, step)
    try:
        partial.parent.mkdir(exist_ok=True)
        remove_partials(partial.parent)
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        final = partial.with_name(partial.name.removeprefix(PARTIAL))
        cause = error if isinstance(error, CheckpointError) else unwritable(final, error)
        raise CheckpointError(
            got=f"{cause.got}, at step {step}",
            expected=cause.expected,
            do=f"{cause.do}; then start again: {last_saved(run_folder)}",
        ) from error


def complete(
    run_folder: Path,
    *,
    step: int,
    digests: Mapping[str, str],
    config: TrainConfig,
    metrics: Extent,
    keep: int,
    form: int = SHARDED,
) -> Path:
    """Makes a checkpoint whose files are written safe, gives it its name, and removes older ones.

    Args:
        run_folder: Of the run.
        step: That is done.
        digests: The SHA-256 of each file.
        config: Of the run.
        metrics: Which rows belong to it.
        keep: How many checkpoints stay.
        form: The format of state.json.
    """
    partial = partial_of(run_folder, step)
    final = partial.with_name(partial.name.removeprefix(PARTIAL))
    description = {
        "format": form,
        "step": step,
        "sha256": dict(digests),
        "config": encode(config),
        "metrics": metrics._asdict(),
    }
    (partial / "state.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        sync(path)
    partial.rename(final)
    sync(final.parent)
    for old in checkpoints(run_folder)[:-keep]:
        # Renamed first, so that a kill in the middle leaves nothing that looks like a checkpoint.
        shutil.rmtree(old.rename(old.with_name(f"{PARTIAL}{old.name}")))
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
    state = read_json(checkpoint / "state.json", newest=SHARDED)
    if is_sharded(checkpoint):
        weights, moments = read_parts(checkpoint)
        load_state(model, weights, checkpoint)
        optimizer.load(moments, checkpoint)
    else:
        own, other = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"
        load_state(model, load_tensors(own, sha256_expected=state["sha256"][own.name]), own)
        optimizer.load(load_tensors(other, sha256_expected=state["sha256"][other.name]), other)
    return position(checkpoint)


def position(checkpoint: Path) -> tuple[int, Extent]:
    """Returns the step of a verified checkpoint, and what was in metrics.jsonl by then."""
    state = read_json(checkpoint / "state.json", newest=SHARDED)
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
    return load_checkpoint(checkpoint)


def load_checkpoint(checkpoint: Path) -> LanguageModel:
    """Reads the model of one checkpoint, of whole files or of parts, without verifying it."""
    if not is_sharded(checkpoint):
        return load_model(checkpoint)
    model = build(load_config(checkpoint))
    load_state(model, read_parts(checkpoint)[0], checkpoint, assign=True)
    return model


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
    state = read_json(path, newest=SHARDED)
    wrong = [name for name, is_whole in _WHOLE.items() if not is_whole(state.get(name))]
    if wrong or checkpoint.name != f"step-{state['step']:08d}":
        raise CheckpointError(
            got=f"{path}, which garbles {', '.join(wrong) or 'its step: ' + str(state['step'])}",
            expected="the step in the folder's name, and a checksum for each file",
            do="copy it again if you have it elsewhere",
        )
    names = FILES if state["format"] == WHOLE else ("config.json", *filter(is_shard, state["sha256"]))
    for name in names:
        file = checkpoint / name
        if not file.is_file() or sha256(file) != state["sha256"].get(name):
            raise CheckpointError(
                got=f"{file}, which is {'truncated or changed' if file.is_file() else 'missing'}",
                expected=f"sha256 {state['sha256'].get(name)}",
                do="copy it again if you have it elsewhere",
            )
    return state


_WHOLE: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int,
    "sha256": lambda value: isinstance(value, dict),
    "config": lambda value: isinstance(value, dict),
    "metrics": is_extent,
}
"""What state.json holds, and how each part is told from a garbled one."""

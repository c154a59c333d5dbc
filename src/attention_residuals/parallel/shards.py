"""Checkpoints that every rank writes its part of, and reads its part of, however many there were before."""

import json
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from attention_residuals.configs import encode
from attention_residuals.errors import AttentionResidualsError, CheckpointError
from attention_residuals.models.weights import FORMAT as MODEL_FORMAT
from attention_residuals.models.weights import read_json, sha256
from attention_residuals.train.checkpoint import complete, last_saved, partial_of, writing
from attention_residuals.train.config import TrainConfig
from attention_residuals.train.metrics import Extent
from attention_residuals.train.optimizer import Optimizer
from attention_residuals.train.shards import SHARDED

__all__ = ["Saving", "begin_saving", "load_parts", "wait_for"]


class Saving(NamedTuple):
    """A checkpoint that is being written in the background."""

    run_folder: Path
    step: int
    done: "Future[Any]"


class _File(NamedTuple):
    """A file that a rank has written."""

    name: str
    sha256: str


class _Writer(HuggingFaceStorageWriter):
    """Writes safetensors and no pickle; once all ranks are done, the first makes a checkpoint of their files."""

    def __init__(self, partial: Path, run_folder: Path, **description: Any) -> None:
        super().__init__(str(partial), save_distributed=True)
        self.partial, self.run_folder, self.description = partial, run_folder, description

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes this rank's part, and takes its checksum while its bytes are near."""
        super().write_data(plan, planner).wait()
        written: torch.futures.Future[list[_File]] = torch.futures.Future()
        number = plan.storage_data["shard_index"]
        written.set_result(
            [_File(path.name, sha256(path)) for path in self.partial.glob(f"shard-{number:05d}-*")]
        )
        return written

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Is called on the first rank, with what ``write_data`` gave on all."""
        digests = {file.name: file.sha256 for files in results for file in files}
        missing = sorted(name for name in digests if not (self.partial / name).is_file())
        if missing:
            raise CheckpointError(
                got=f"{self.partial} without {missing[0]}, which another rank says it has written",
                expected="a folder that all ranks share",
                do="put the run on a disk that all machines see",
            )
        digests["config.json"] = sha256(self.partial / "config.json")
        complete(self.run_folder, digests=digests, **self.description)


def begin_saving(
    run_folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    config: TrainConfig,
    metrics: Extent,
    keep: int,
    group: dist.ProcessGroup,
) -> Saving:
    """Copies this rank's tensors and writes them in the background; all ranks call it together.

    Args:
        run_folder: Of the run.
        tensors: By their names in a whole checkpoint; what several ranks have is written by one of them.
        step: That is done.
        config: Of the run.
        metrics: Which rows belong to it; the first rank's counts.
        keep: How many checkpoints stay.
        group: For the background alone.

    Raises:
        CheckpointError: The folder cannot be made.
    """
    partial = partial_of(run_folder, step)
    if dist.get_rank() == 0:
        with writing(run_folder, step):
            partial.mkdir()
            description = {"format": MODEL_FORMAT, "model": encode(config.model)}
            (partial / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    dist.barrier(group)
    writer = _Writer(partial, run_folder, step=step, config=config, metrics=metrics, keep=keep)
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    future = async_save(whole, storage_writer=writer, process_group=group)
    assert isinstance(future, Future)
    return Saving(run_folder, step, future)


def wait_for(saving: Saving) -> None:
    """Waits until a checkpoint is there.

    Raises:
        CheckpointError: Some rank could not write; the half-written one is cleared away at the next start.
    """
    try:
        saving.done.result()
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        ours = cause if isinstance(cause, AttentionResidualsError) else None
        raise CheckpointError(
            got=f"a checkpoint of step {saving.step} that could not be written: {ours.got if ours else cause}",
            expected=ours.expected if ours else "a disk that takes the parts of all ranks",
            do=f"{ours.do if ours else 'see the cause'}; then start again: {last_saved(saving.run_folder)}",
        ) from error


def load_parts(checkpoint: Path, tensors: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Puts a verified checkpoint's numbers into this rank's tensors, reading only what belongs there.

    Args:
        checkpoint: Of whole files, or of the parts of any number of ranks.
        tensors: The model's on this rank, by name; are written into.
        optimizer: Of this rank.

    Raises:
        CheckpointError: The tensors do not fit.
    """
    _check_listed(checkpoint)
    reader = HuggingFaceStorageReader(str(checkpoint))
    found = reader.read_metadata().state_dict_metadata
    known = {key: there.size for key, there in found.items() if isinstance(there, TensorStorageMetadata)}
    moments: dict[str, Tensor] = {}
    for key, size in known.items():
        what, _, name = key.partition("/")
        if name in optimizer.named:
            like, scalar = optimizer.named[name].detach(), not size
            moments[f"{what}/{name}"] = (
                torch.zeros((), dtype=torch.float32) if scalar else torch.zeros_like(like)
            )
    wanted = {**{name: tensor.detach() for name, tensor in tensors.items()}, **moments}
    wrong = [name for name in wanted if name not in known or known[name] != wanted[name].shape]
    if wrong:
        raise CheckpointError(
            got=f"{checkpoint}: {len(wrong)} tensors that do not fit the model, the first is {wrong[0]}",
            expected="the tensors of this very config",
            do="go on with the config that the run began with",
        )
    load(wanted, storage_reader=reader)
    optimizer.load(moments, checkpoint)


def _check_listed(checkpoint: Path) -> None:
    """Checks that no other file of tensors lies there: the reader would take it for a part."""
    listed = read_json(checkpoint / "state.json", newest=SHARDED)["sha256"]
    extra = sorted({path.name for path in checkpoint.glob("*.safetensors")} - set(listed))
    if extra:
        raise CheckpointError(
            got=f"{checkpoint} with {extra[0]}, which does not belong to it",
            expected="the files that state.json lists",
            do="take it away",
        )

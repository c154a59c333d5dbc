"""Who computes the passes of a training run: this process alone, or this process as one rank of several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_residuals.data import Batch
from attention_residuals.models import LanguageModel
from attention_residuals.train.checkpoint import restore, save_checkpoint
from attention_residuals.train.config import TrainConfig
from attention_residuals.train.evaluation import total_nats
from attention_residuals.train.metrics import Extent
from attention_residuals.train.optimizer import Optimizer, by_layout

__all__ = ["Executes", "Execution", "InProcess", "backward"]


class Execution(ABC):
    """Runs a model's passes on batches that every rank is given whole; what it returns is the same on all.

    ``model`` is the whole model, or what is left of it on this rank.
    """

    model: LanguageModel
    is_lead: bool = True
    """This process writes files and speaks; of several, one does."""
    muon: type[torch.optim.Muon] = torch.optim.Muon

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields what this process trains, by its names in the whole model."""

    @abstractmethod
    def backward(self, batch: Batch) -> float:
        """Adds the gradients of a batch's mean loss per scored token; returns its summed cross-entropy in nats."""

    @abstractmethod
    def nats(self, batch: Batch) -> float:
        """Returns the summed cross-entropy of a batch's targets, in nats, without gradients."""

    @abstractmethod
    def save(
        self,
        folder: Path,
        *,
        step: int,
        optimizer: Optimizer,
        config: TrainConfig,
        metrics: Extent,
        keep: int,
    ) -> None:
        """Writes a checkpoint of a run, or begins to; ``settle`` waits until it is there."""

    @abstractmethod
    def restore(self, checkpoint: Path, optimizer: Optimizer) -> tuple[int, Extent]:
        """Puts a verified checkpoint's bits into model and optimizer; returns its step and its rows."""

    def gradient_norm(self, parameters: list[Tensor]) -> Tensor:
        """Returns the norm of all gradients of the whole model together."""
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def clip(self, parameters: list[Tensor], largest: float, norm: Tensor) -> None:
        """Scales the gradients down to a norm."""
        for alike in by_layout(parameters):
            nn.utils.clip_grads_with_norm_(alike, largest, norm)

    def begin(self, step: int) -> None:  # noqa: B027 - one process has nothing to do there
        """Is told which step comes next."""

    def agree(self, what: dict[str, Any]) -> None:  # noqa: B027
        """Refuses ranks that would do different things."""

    def any(self, flag: bool) -> bool:
        """Tells whether a flag is set on any rank."""
        return flag

    def settle(self) -> None:  # noqa: B027
        """Waits until the last checkpoint is written."""

    def abandon(self) -> None:  # noqa: B027
        """Waits until nothing is being written, whether that went well or not; after an error, which goes first."""

    def describe(self) -> dict[str, Any]:
        """Returns what environment.json shall say about the ranks."""
        return {}


Executes = Callable[[LanguageModel, TrainConfig, str], Execution]
"""Makes the execution of a new model, for a config and a device."""


class InProcess(Execution):
    """This process alone.

    Args:
        model: What to train.
        config: How.
        device: Where.
    """

    def __init__(self, model: LanguageModel, config: TrainConfig, device: str) -> None:
        self.model, self.config = model.to(device), config
        self.forward: Callable[..., Tensor] = torch.compile(self.model) if config.compile else self.model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the model's."""
        yield from self.model.named_parameters()

    def backward(self, batch: Batch) -> float:
        """Runs micro-batch after micro-batch."""
        return backward(self.forward, batch, self.config)

    @torch.no_grad()
    def nats(self, batch: Batch) -> float:
        """Runs the model as it is, not compiled."""
        precision, cross = self.config.precision, self.config.cross_documents
        return total_nats(self.model, batch, precision=precision, cross_documents=cross).item()

    def save(
        self,
        folder: Path,
        *,
        step: int,
        optimizer: Optimizer,
        config: TrainConfig,
        metrics: Extent,
        keep: int,
    ) -> None:
        """Writes a checkpoint of whole files."""
        save_checkpoint(
            folder,
            step=step,
            model=self.model,
            optimizer=optimizer,
            config=config,
            metrics=metrics,
            keep=keep,
        )

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> tuple[int, Extent]:
        """Reads a checkpoint, of whole files or of shards."""
        return restore(checkpoint, self.model, optimizer)


def backward(model: Callable[..., Tensor], batch: Batch, config: TrainConfig) -> float:
    """Adds the gradients of a batch's mean loss per scored token, micro-batch by micro-batch.

    Returns:
        The summed cross-entropy of the batch, nats.
    """
    nats, num_tokens = 0.0, max(1, batch.num_scored)
    for part in batch.split(config.sequences_per_pass):
        micro_nats = total_nats(
            model, part, precision=config.precision, cross_documents=config.cross_documents
        )
        (micro_nats / num_tokens).backward()
        nats += micro_nats.item()
    return nats

"""Edits of what writers write: every later reader sees the change, in keys and in values."""

from abc import ABC
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.layers.tap import Write
from attention_residuals.trace.edits import WriteEdit
from attention_residuals.trace.place import Place
from attention_residuals.trace.selection import Names, Numbers, checked_names, checked_numbers, in_numbers

__all__ = ["MeanWrite", "PatchWrite", "ResampleWrite", "Skip", "ZeroWrite"]


@dataclass(frozen=True, kw_only=True)
class _NamedWrites(WriteEdit, ABC):
    """Edits whose writers are named.

    Args:
        writers: Names or patterns of writers: ``"L3.mlp"``, ``"embedding"``, ``"attention"`` (all of a kind).
    """

    writers: Names

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_names("writers", self.writers)

    def writer_patterns(self, num_layers: int) -> Names:
        """Names the writers."""
        return self.writers


@dataclass(frozen=True, kw_only=True)
class ZeroWrite(_NamedWrites):
    """The writers write zeros."""

    def output(self, write: Write, at: Place) -> Tensor:
        """Is zero."""
        return torch.zeros_like(write.output)


@dataclass(frozen=True, kw_only=True)
class MeanWrite(_NamedWrites):
    """The writers write their means over data.

    Args:
        reference: The name of the means (``dataset_mean``) among the references.
    """

    reference: str = "mean"

    def output(self, write: Write, at: Place) -> Tensor:
        """Is the mean."""
        mean = at.scene.means(self.reference).write(write.writer)
        return mean.to(write.output.dtype).expand_as(write.output)


@dataclass(frozen=True, kw_only=True)
class ResampleWrite(_NamedWrites):
    """The writers write what they write for another text at the same position.

    Args:
        reference: The name of a run (``reference_of``) among the references. That of the very texts that are
            edited lets their rows exchange what they write, as it is without edits.
        row: The row that is taken; None: drawn at random, where the run has as many rows never the row itself.
        seed: Decides the draw, the same one for all writers.
    """

    reference: str = "other"
    row: int | None = None
    seed: int = 0

    def output(self, write: Write, at: Place) -> Tensor:
        """Is another row's."""
        run, donor = at.scene.resampled(self.reference, self.row, self.seed)
        return at.scene.taken(run.write(write.writer), donor, at.tokens)


@dataclass(frozen=True, kw_only=True)
class PatchWrite(_NamedWrites):
    """The writers write what they wrote in a paired run at the same position.

    Args:
        reference: The name of the run (``reference_of``) among the references.
    """

    reference: str = "paired"

    @property
    def paired_with(self) -> str:
        """The run."""
        return self.reference

    def output(self, write: Write, at: Place) -> Tensor:
        """Is the paired run's."""
        run, donor = at.scene.paired(self.reference)
        return at.scene.taken(run.write(write.writer), donor, at.tokens)


@dataclass(frozen=True, kw_only=True)
class Skip(WriteEdit):
    """Layers write nothing: neither their attention nor their MLP.

    Where outputs are sources of their own, zeros keep a share of the weights; a reader with a
    scale-invariant norm sees the same as if they were not there.

    Args:
        layers: Numbers of layers and ranges of them, as in ``(0, "3..6", -1)``.
    """

    layers: Numbers

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_numbers("layers", self.layers)

    def writer_patterns(self, num_layers: int) -> Names:
        """Names both writers of each layer.

        Raises:
            ConfigError: None of the layers exists, or one that is named does not.
        """
        every = torch.arange(num_layers)[None]
        chosen = in_numbers(every, self.layers, torch.tensor([num_layers]))[0]
        named = [one for one in self.layers if isinstance(one, int)]
        if not chosen.any() or not all(-num_layers <= one < num_layers for one in named):
            raise ConfigError(
                got=f"layers={self.layers}",
                expected=f"layers of a model of {num_layers}, 0 to {num_layers - 1}",
                do="name layers that it has",
            )
        return tuple(
            f"L{layer}.{kind}"
            for layer in chosen.nonzero().flatten().tolist()
            for kind in ("attention", "mlp")
        )

    def output(self, write: Write, at: Place) -> Tensor:
        """Is zero."""
        return torch.zeros_like(write.output)

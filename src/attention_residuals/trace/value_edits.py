"""Edits of what a read finds in its sources; its weights stay, or are made anew of what it finds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_residuals.errors import EditError
from attention_residuals.layers.residual.inkling2 import Inkling2Rule
from attention_residuals.layers.tap import Read
from attention_residuals.ops.depth_read import compute_dtype
from attention_residuals.trace.edits import ReadEdit, SourceEdit, by_token, rescored, with_value
from attention_residuals.trace.place import Place
from attention_residuals.trace.references import read_name

__all__ = ["Mean", "Patch", "RemoveWriter", "Resample", "ValueEdit", "Zero"]


@dataclass(frozen=True, kw_only=True)
class Zero(SourceEdit):
    """The sources contribute nothing, and their weights stay as they are.

    After a softmax the state is (1 - a_k) times what ``Drop`` leaves, so that a reader with a scale-invariant
    norm sees the same, but for weights so near 1 that the norm's eps matters.
    """

    def edited(self, read: Read, at: Place) -> Read:
        """Puts zeros in place of the values."""
        for source in at.sources:
            nothing = torch.zeros_like(read.values[source])
            read = with_value(read, at, source, nothing, torch.zeros_like(by_token(read).membership[source]))
        return read


@dataclass(frozen=True, kw_only=True)
class ValueEdit(SourceEdit, ABC):
    """The sources' values are other ones.

    Args:
        reroute: The rule makes new scores and weights of the new values; else the weights stay.
    """

    reroute: bool = False

    @property
    def scores_anew(self) -> bool:
        """Where it routes anew."""
        return self.reroute

    @property
    def keeps_scores(self) -> bool:
        """Where it routes anew."""
        return self.reroute

    @abstractmethod
    def value(self, read: Read, source: int, at: Place) -> Tensor:
        """Returns a source's other value; tokens that are not chosen do not matter."""

    def edited(self, read: Read, at: Place) -> Read:
        """Puts the values in place; who wrote them is unknown, which membership says by NaN."""
        for source in at.sources:
            unknown = torch.full_like(by_token(read).membership[source], torch.nan)
            read = with_value(read, at, source, self.value(read, source, at), unknown)
        return rescored(read, at) if self.reroute else read


@dataclass(frozen=True, kw_only=True)
class Mean(ValueEdit):
    """The values are their means over data.

    Args:
        reference: The name of the means (``dataset_mean``) among the references.
    """

    reference: str = "mean"

    def value(self, read: Read, source: int, at: Place) -> Tensor:
        """Takes the mean of the source at this read."""
        mean = at.scene.means(self.reference).at(read).values[source]
        return mean.to(read.values[source].dtype).expand_as(read.values[source])


@dataclass(frozen=True, kw_only=True)
class Resample(ValueEdit):
    """The values are those of another text at the same position, so that they stay usual ones.

    Args:
        reference: The name of a run (``reference_of``) among the references. That of the very texts that are
            edited lets their rows exchange what they hold, as it is without edits.
        row: The row that is taken; None: drawn at random, where the run has as many rows never the row itself.
        seed: Decides the draw, the same one for all sources and sites.
    """

    reference: str = "other"
    row: int | None = None
    seed: int = 0

    def value(self, read: Read, source: int, at: Place) -> Tensor:
        """Takes the value of another row."""
        run, donor = at.scene.resampled(self.reference, self.row, self.seed)
        return at.scene.taken(run.at(read).values[source], donor, at.tokens)


@dataclass(frozen=True, kw_only=True)
class Patch(ValueEdit):
    """The values are those of a paired run at the same position.

    Args:
        reference: The name of the run (``reference_of``) among the references.
    """

    reference: str = "paired"

    @property
    def paired_with(self) -> str:
        """The run."""
        return self.reference

    def value(self, read: Read, source: int, at: Place) -> Tensor:
        """Takes the value of the same row."""
        run, donor = at.scene.paired(self.reference)
        return at.scene.taken(run.at(read).values[source], donor, at.tokens)


@dataclass(frozen=True, kw_only=True)
class RemoveWriter(ReadEdit):
    """One writer's output is taken out of the sources that hold it.

    With the weights as they were this is exactly linear; routed anew, the rest of a block is scored as if
    the writer had never been in it. The difference of the two is itself a finding.

    Args:
        writer: Its name: ``"embedding"`` or ``"L3.mlp"``.
        reroute: The rule makes new scores and weights of what is left.
    """

    writer: str
    reroute: bool = False

    @property
    def scores_anew(self) -> bool:
        """Where it routes anew."""
        return self.reroute

    @property
    def keeps_scores(self) -> bool:
        """Where it routes anew."""
        return self.reroute

    def edited(self, read: Read, at: Place) -> Read:
        """Takes the output out of the values.

        Raises:
            EditError: Nobody knows who wrote the values, since an earlier edit put them in place.
        """
        for source in at.sources:
            read = self._without(read, at, source)
        return rescored(read, at) if self.reroute else read

    def _without(self, read: Read, at: Place, source: int) -> Read:
        writer, output = read.writers.index(self.writer), at.scene.writes[self.writer]
        held_WBT = by_token(read).membership[source]
        if held_WBT[writer][at.tokens].isnan().any():
            raise EditError(
                got=f"RemoveWriter at {read_name(read)} behind an edit that put values in place",
                expected="values of which is known who wrote them",
                do="put RemoveWriter first",
            )
        left_WBT = held_WBT.index_fill(0, torch.tensor(writer, device=held_WBT.device), 0.0)
        output = output.to(compute_dtype(output.dtype))
        whole, old = read.sources[source], read.values[source]
        value = old.to(output.dtype) - held_WBT[writer].to(output.dtype)[..., None] * output
        if old is whole:
            return with_value(read, at, source, value, left_WBT)
        # The value is the source divided by its root mean square, which stays where the weights do.
        rest = whole.to(output.dtype) - output
        if self.reroute:
            rule = at.scene.rule
            assert isinstance(rule, Inkling2Rule)
            scale_BT = (rest.square().mean(-1) + rule.config.key_eps).rsqrt()
            value, left_WBT = rest * scale_BT[..., None], torch.where(left_WBT != 0, scale_BT.detach(), 0.0)
        read = with_value(read, at, source, value, left_WBT)
        kept = torch.where(at.tokens[..., None], rest.to(whole.dtype), whole)
        return read._replace(sources=(*read.sources[:source], kept, *read.sources[source + 1 :]))

"""The standard residual connection: every earlier output with weight 1."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attention_residuals.layers.residual.interface import (
    Norm,
    ResidualConfig,
    ResidualRule,
    Semantics,
    checked_output,
)
from attention_residuals.layers.tap import (
    EMBEDDING,
    Site,
    Tap,
    offer_read,
    offer_write,
    ones_weights,
    unscored_read,
    writer_names,
)
from attention_residuals.ops import traffic, weighted_sum

__all__ = ["StandardResidual", "StandardRule", "StandardState"]


@dataclass(frozen=True, kw_only=True)
class StandardResidual(ResidualConfig):
    """The sum of all earlier outputs, as in every pre-norm transformer.

    Example:
        >>> StandardResidual().build(num_layers=2, width=8).num_sources(Site(1, "mlp"))
        1
    """

    formula: ClassVar[str] = "h = sum_i v_i"

    def build(self, *, num_layers: int, width: int) -> "StandardRule":
        """Makes the rule, which has no parameters."""
        return StandardRule(self, num_layers, width)


class StandardState(NamedTuple):
    """The residual stream."""

    stream: Tensor


class StandardRule(ResidualRule[StandardState]):
    """Reads the stream as it is.

    To a tap, the stream is one source with weight 1 that contains every earlier writer once.

    Source:
        He et al., arXiv:1512.03385; pre-norm form: Xiong et al., arXiv:2002.04745.
    """

    semantics = Semantics(sources="cumulative", weights="one", output_read=False)

    def __init__(self, config: StandardResidual, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.config = config

    def open(self, embedding: Tensor, tap: Tap | None = None) -> StandardState:
        """Starts the stream."""
        return StandardState(offer_write(tap, EMBEDDING, embedding))

    def read(
        self, state: StandardState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], StandardState]:
        """Normalises the stream."""
        if tap is not None:
            writers = writer_names(self.num_written(site))
            one, member = ones_weights(state.stream), torch.ones(1, len(writers))
            changed = offer_read(tap, unscored_read(site, ("stream",), (state.stream,), one, writers, member))
            if changed is not None:
                return (norm(weighted_sum(changed.weights, changed.values)),), state
        return (norm(state.stream),), state

    def write(
        self, state: StandardState, site: Site, output: Tensor, tap: Tap | None = None
    ) -> StandardState:
        """Adds to the stream."""
        written = offer_write(tap, site, checked_output(output, state.stream, site))
        stream = state.stream + written
        traffic.note((state.stream, written), (stream,))
        return StandardState(stream)

    def num_sources(self, site: Site) -> int:
        """Is 1: the stream."""
        return 1

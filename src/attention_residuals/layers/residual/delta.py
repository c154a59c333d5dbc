"""Delta attention residuals: depth attention beside the residual stream, not in its place."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from attention_residuals.layers.residual.attnres import AttnRes, AttnResRule
from attention_residuals.layers.residual.interface import Semantics
from attention_residuals.layers.residual.sources import SourceState, read_often
from attention_residuals.layers.tap import Site, Tap

__all__ = ["Delta", "DeltaRule", "DeltaState"]


@dataclass(frozen=True, kw_only=True)
class Delta(AttnRes):
    """The standard residual stream plus what depth attention reads.

    The stream is the sum of all sources, so every source has weight 1 plus its softmax weight. What its
    authors call the true difference of their method is this addition; of the sources (outputs, or block
    sums) they say the same as Attention Residuals does.

    Source:
        Delta Attention Residuals (arXiv:2605.18855) and the authors' later correction.

    Example:
        >>> Delta().build(num_layers=2, width=8).semantics.weights
        '1 + softmax'
    """

    formula: ClassVar[str] = "h = sum_s (1 + softmax_s(w . (g * v_s) / rms(v_s))) v_s"

    def build(self, *, num_layers: int, width: int) -> "DeltaRule":
        """Makes the rule, with 2 D parameters per site."""
        return DeltaRule(self, num_layers, width)


class DeltaState(NamedTuple):
    """The sources, and their sum."""

    blocks: tuple[Tensor, ...]
    open_block: tuple[Tensor, ...] = ()
    stream: tuple[Tensor, ...] = ()


class DeltaRule(AttnResRule):
    """Adds the stream to what attention residuals would read."""

    semantics = Semantics(sources="increments", weights="1 + softmax")

    def weights_of(self, logits: Float[Tensor, "S *BT"]) -> Float[Tensor, "S *BT"]:
        """Makes weights of scores."""
        return 1 + logits.softmax(0)

    def beside(self, state: Any) -> Tensor:
        """Returns the stream."""
        stream: Tensor = state.stream[0]
        return stream

    def opened(self, embedding: Tensor, tap: Tap | None) -> DeltaState:
        """Starts sources and stream."""
        source = read_often(embedding, tap)
        return DeltaState((source,), (), (source,))

    def written(self, state: Any, site: Site, output: Tensor, tap: Tap | None) -> DeltaState:
        """Adds to the open block and to the stream."""
        grown: SourceState = super().written(state, site, output, tap)
        return DeltaState(*grown, (state.stream[0] + output,))

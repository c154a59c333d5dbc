"""Attention residuals whose weights do not compete (an ablation of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual.interface import Semantics
from attention_residuals.layers.residual.sources import DepthReader, SourceConfig, SourceRule, reader_name
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_logits

__all__ = ["Sigmoid", "SigmoidRule"]


@dataclass(frozen=True, kw_only=True)
class Sigmoid(SourceConfig):
    """Sigmoid attention over depth: every source is weighted by itself.

    The paper says no more than "softmax to sigmoid". No sum to divide by and no bias is the shortest
    reading, and every reader starts with a norm, which divides by the size of the mix anyway;
    ``normalised`` divides by the sum.

    Args:
        normalised: Divide the weights by their sum.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "sigmoid".
    """

    formula: ClassVar[str] = "h = sum_s sigmoid(w . (g * v_s) / rms(v_s)) v_s"
    normalised: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalised, bool):
            raise ConfigError(
                got=f"normalised={self.normalised!r}", expected="True or False", do="pass one of them"
            )

    def build(self, *, num_layers: int, width: int) -> "SigmoidRule":
        """Makes the rule, with 2 D parameters per site."""
        return SigmoidRule(self, num_layers, width)


class SigmoidRule(SourceRule):
    """Reads by independent weights, each 1/2 at the start."""

    config: Sigmoid
    semantics = Semantics(sources="increments", weights="sigmoid")

    def make_reader(self, site: Site, part: str) -> DepthReader:
        """Makes a pseudo-query and a key gain."""
        return DepthReader(self.width)

    def weights_of(self, logits: Float[Tensor, "S *BT"]) -> Float[Tensor, "S *BT"]:
        """Makes weights of scores."""
        # In logarithms, so that scores far below zero leave something to divide by.
        return F.logsigmoid(logits).softmax(0) if self.config.normalised else logits.sigmoid()

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Scores the sources, then mixes them."""
        reader = self.readers[reader_name(site, part)]
        assert isinstance(reader, DepthReader)
        scores = depth_logits(values, reader.direction(), eps=self.config.key_eps)
        return self.mixed(scores, values, output_gain, output_eps)

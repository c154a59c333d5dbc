"""Attention residuals with weights of their own for groups of channels (an ablation of the paper)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual.sources import DepthReader, SourceConfig, SourceRule, reader_name
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_logits

__all__ = ["MultiHead", "MultiHeadRule"]


@dataclass(frozen=True, kw_only=True)
class MultiHead(SourceConfig):
    """Softmax attention over depth in H groups of channels, each with weights of its own.

    The paper does not say whether a head's keys are divided by the size of the whole source or of the head's
    own channels. It changes nothing else in this ablation, and its norm is over the whole source, so that is
    the default.

    Args:
        num_heads: H; divides the width. The paper's ablation has 16.
        key_norm: ``"full"``: over the whole source; ``"head"``: over the head's channels.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "multihead".
    """

    formula: ClassVar[str] = (
        "h[c] = sum_s softmax_s(w[c] . (g * v_s)[c] / rms(v_s)) v_s[c], c = channels of a head"
    )
    num_heads: int = 4
    key_norm: Literal["full", "head"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.num_heads):
            raise ConfigError(
                got=f"num_heads={self.num_heads!r}", expected="1 or more", do="use a divisor of the width"
            )
        if self.key_norm not in ("full", "head"):
            raise ConfigError(
                got=f"key_norm={self.key_norm!r}", expected="'full' or 'head'", do="'full' is the default"
            )

    def build(self, *, num_layers: int, width: int) -> "MultiHeadRule":
        """Makes the rule, with 2 D parameters per site.

        Raises:
            ConfigError: The heads do not divide the width.
        """
        if width % self.num_heads:
            raise ConfigError(
                got=f"num_heads={self.num_heads} for a width of {width}",
                expected="a divisor of the width",
                do=f"use one of {[n for n in range(1, width + 1) if width % n == 0]}",
            )
        return MultiHeadRule(self, num_layers, width)


class MultiHeadRule(SourceRule):
    """Reads each group of channels by weights of its own."""

    config: MultiHead

    def make_reader(self, site: Site, part: str) -> DepthReader:
        """Makes a pseudo-query and a key gain, cut into heads when used."""
        return DepthReader(self.width)

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Scores the sources a head at a time, then mixes them."""
        reader = self.readers[reader_name(site, part)]
        assert isinstance(reader, DepthReader)
        scores = depth_logits(
            values,
            reader.direction(),
            eps=self.config.key_eps,
            num_heads=self.config.num_heads,
            norm_per_head=self.config.key_norm == "head",
        )
        return self.mixed(scores, values, output_gain, output_eps)

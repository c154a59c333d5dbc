"""Attention residuals: each site attends over the outputs of earlier sublayers or over block sums of them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attention_residuals.layers.residual.sources import (
    DepthReader,
    SourceConfig,
    SourceRule,
    reader_name,
)
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_attention, depth_mix

__all__ = ["AttnRes", "AttnResRule"]


@dataclass(frozen=True, kw_only=True)
class AttnRes(SourceConfig):
    """Softmax attention over depth: the paper's rule, Full and Block.

    Source:
        Attention Residuals (arXiv:2603.15031), sections 3.1 and 3.2.

    Example:
        >>> rule = AttnRes(sublayers_per_block=4).build(num_layers=8, width=16)
        >>> [rule.num_sources(site) for site in rule.sites()]
        [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5]
    """

    formula: ClassVar[str] = "h = sum_s softmax_s(w . (g * v_s) / rms(v_s)) v_s"

    def build(self, *, num_layers: int, width: int) -> "AttnResRule":
        """Makes the rule, with 2 D parameters per site."""
        return AttnResRule(self, num_layers, width)


class AttnResRule(SourceRule):
    """Full (``sublayers_per_block=1``) and Block attention residuals.

    The mix replaces the residual stream. ``backend`` may be set to any name that ``depth_attention`` takes.

    Source:
        Attention Residuals (arXiv:2603.15031), equations 1 to 6; output read as in Kimi K3
        (arXiv:2607.24653).
    """

    backend = "auto"

    def make_reader(self, site: Site, part: str) -> DepthReader:
        """Makes a pseudo-query and a key gain."""
        return DepthReader(self.width)

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Attends over the sources."""
        reader = self.readers[reader_name(site, part)]
        assert isinstance(reader, DepthReader)
        return depth_attention(
            values,
            reader.pseudo_query,
            reader.key_gain,
            eps=self.config.key_eps,
            output_gain=output_gain,
            output_eps=output_eps,
            backend=self.backend,
        )

    def mix(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> Tensor:
        """Attends over the sources, and keeps no scores."""
        if type(self).attend is not AttnResRule.attend:  # a rule derived from this one attends otherwise
            return super().mix(values, site, part, output_gain, output_eps)
        reader = self.readers[reader_name(site, part)]
        assert isinstance(reader, DepthReader)
        return depth_mix(
            values,
            reader.pseudo_query,
            reader.key_gain,
            eps=self.config.key_eps,
            output_gain=output_gain,
            output_eps=output_eps,
            backend=self.backend,
        )

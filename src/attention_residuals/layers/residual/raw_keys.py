"""Attention residuals without the norm on keys (an ablation of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention_residuals.layers.residual.sources import SourceConfig, SourceRule, reader_name
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_attention

__all__ = ["RawKeys", "RawKeysRule"]


@dataclass(frozen=True, kw_only=True)
class RawKeys(SourceConfig):
    """Softmax attention over depth whose keys are the sources as they are; ``key_eps`` has no effect.

    Without a norm a gain would only rescale the query, so there is none.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "w/o RMSNorm".

    Example:
        >>> rule = RawKeys().build(num_layers=2, width=8)
        >>> sum(parameter.numel() for parameter in rule.parameters()) == 8 * len(rule.sites())
        True
    """

    formula: ClassVar[str] = "h = sum_s softmax_s(w . v_s) v_s"

    def build(self, *, num_layers: int, width: int) -> "RawKeysRule":
        """Makes the rule, with D parameters per site."""
        return RawKeysRule(self, num_layers, width)


class RawQuery(nn.Module):
    """A pseudo-query alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pseudo_query = nn.Parameter(torch.zeros(width))


class RawKeysRule(SourceRule):
    """Reads by the product of the pseudo-query and the sources themselves."""

    def make_reader(self, site: Site, part: str) -> RawQuery:
        """Makes a pseudo-query."""
        return RawQuery(self.width)

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Attends over the sources, unnormalised keys and all."""
        query = self.readers[reader_name(site, part)].pseudo_query
        assert isinstance(query, Tensor)
        gain = torch.ones_like(query)
        return depth_attention(values, query, gain, eps=None, output_gain=output_gain, output_eps=output_eps)

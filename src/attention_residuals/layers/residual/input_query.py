"""Attention residuals whose query depends on the input (an ablation of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_residuals.layers.residual.sources import SourceConfig, SourceRule, reader_name
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_logits
from attention_residuals.ops.depth_read import compute_dtype
from attention_residuals.ops.eager import without_autocast

__all__ = ["InputQuery", "InputQueryRule"]


@dataclass(frozen=True, kw_only=True)
class InputQuery(SourceConfig):
    """Softmax attention over depth with a query projected from the newest source of each token.

    The paper projects "the current hidden state" and does not say which tensor that is, whether it is
    normalised, or how the projection starts. Here it is the newest source (the open block, in the block
    form), divided by its root mean square so that the query does not grow with it. The projection
    starts at zero, so that a fresh model is the standard model, as with a static query.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "input-dependent query".
    """

    formula: ClassVar[str] = "h = sum_s softmax_s(W v_newest/rms . (g * v_s) / rms(v_s)) v_s"

    def build(self, *, num_layers: int, width: int) -> "InputQueryRule":
        """Makes the rule, with D x D + D parameters per site."""
        return InputQueryRule(self, num_layers, width)


class QueryReader(nn.Module):
    """A projection to the query (zero at the start) and a key gain (one at the start)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width, width))
        self.key_gain = nn.Parameter(torch.ones(width))


class InputQueryRule(SourceRule):
    """Reads by a query of each token's own; it cannot be known before the newest source is."""

    def make_reader(self, site: Site, part: str) -> QueryReader:
        """Makes the projection and a key gain."""
        return QueryReader(self.width)

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Makes the query, scores the sources, then mixes them."""
        reader = self.readers[reader_name(site, part)]
        assert isinstance(reader, QueryReader)
        dtype = compute_dtype(values[-1].dtype)
        newest = F.rms_norm(values[-1].to(dtype), (self.width,), None, self.config.key_eps)
        with without_autocast(newest.device.type):
            query = F.linear(newest, reader.query.to(dtype)) * reader.key_gain.to(dtype)
        scores = depth_logits(values, query, eps=self.config.key_eps)
        return self.mixed(scores, values, output_gain, output_eps)

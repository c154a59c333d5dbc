"""The depth attention of Inkling2: normalised values, scaled scores, reads apart for q, k and v."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.layers.residual.interface import Semantics
from attention_residuals.layers.residual.raw_keys import RawQuery
from attention_residuals.layers.residual.sources import (
    SourceConfig,
    SourceRule,
    SourceState,
    read_often,
    reader_name,
)
from attention_residuals.layers.tap import Site, Tap
from attention_residuals.ops import DepthRead, depth_attention
from attention_residuals.ops.depth_read import compute_dtype

__all__ = ["Inkling2", "Inkling2Rule", "Inkling2State"]


@dataclass(frozen=True, kw_only=True)
class Inkling2(SourceConfig):
    """Attention residuals whose values, too, are the normalised sources.

    Sources are divided by their root mean square without a gain; that is what is scored, with a scale of
    D^-1/2, and what is mixed. An attention site reads three times, for queries, keys and values. The first
    site takes the embedding as it is.

    Source:
        The ``inkling2`` model of Transformers 5.24.

    Example:
        >>> Inkling2(sublayers_per_block=4).build(num_layers=4, width=8).parts(Site(1, "attention"))
        ('q', 'k', 'v')
    """

    formula: ClassVar[str] = (
        "h = sum_s softmax_s(w . u_s / sqrt(D)) u_s, u_s = v_s / rms(v_s); one w for each of q, k, v"
    )

    def build(self, *, num_layers: int, width: int) -> "Inkling2Rule":
        """Makes the rule, with 3 D parameters per attention site and D at the others."""
        return Inkling2Rule(self, num_layers, width)


class Inkling2State(NamedTuple):
    """The sources, and the finished ones normalised, so that each is normalised once."""

    blocks: tuple[Tensor, ...]
    open_block: tuple[Tensor, ...] = ()
    normalised: tuple[Tensor, ...] = ()


class Inkling2Rule(SourceRule):
    """Reads normalised sources; attention takes three inputs."""

    semantics = Semantics(sources="increments", weights="softmax", values="normalised")

    def parts(self, site: Site) -> tuple[str, ...]:
        """Names the reads of a site."""
        return ("q", "k", "v") if site.kind == "attention" else ("in",)

    def make_reader(self, site: Site, part: str) -> RawQuery:
        """Makes a pseudo-query."""
        return RawQuery(self.width)

    def opened(self, embedding: Tensor, tap: Tap | None) -> Inkling2State:
        """Starts with the embedding, which is normalised for every site but the first."""
        return Inkling2State((embedding,), (), (read_often(self._normalised(embedding), tap),))

    def written(self, state: Any, site: Site, output: Tensor, tap: Tap | None) -> Inkling2State:
        """Adds to the open block, and normalises it once it is finished."""
        grown: SourceState = super().written(state, site, output, tap)
        if grown.open_block:
            return Inkling2State(*grown, state.normalised)
        finished = read_often(self._normalised(grown.blocks[-1]), tap)
        return Inkling2State(*grown, (*state.normalised, finished))

    def values(self, state: Any, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the normalised sources; the embedding itself while it is alone."""
        if len(sources) == 1:
            return sources
        return (*state.normalised, *(self._normalised(source) for source in state.open_block))

    def value_membership(self, site: Site, sources: tuple[Tensor, ...]) -> Float[Tensor, "S W B T"]:
        """A normalised value holds each of its writers 1/rms times."""
        member_SW11 = self.membership(site)[..., None, None].to(sources[0].device)
        if len(sources) == 1:
            return member_SW11.expand(-1, -1, *sources[0].shape[:-1])
        dtype = compute_dtype(sources[0].dtype)
        inverse_rms_SBT = torch.stack(
            [(s.detach().to(dtype).square().mean(-1) + self.config.key_eps).rsqrt() for s in sources]
        )
        return member_SW11.to(dtype) * inverse_rms_SBT[:, None]

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Attends over the normalised sources, which are keys and values both."""
        query = self.readers[reader_name(site, part)].pseudo_query
        assert isinstance(query, Tensor)
        scale = torch.full_like(query, self.width**-0.5)
        return depth_attention(values, query, scale, eps=None, output_gain=output_gain, output_eps=output_eps)

    def _normalised(self, source: Tensor) -> Tensor:
        return F.rms_norm(source, (self.width,), None, self.config.key_eps)

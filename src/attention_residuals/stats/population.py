"""Statistics of many tokens, of a full trace or streamed: sinks, and how much routing looks at its input.

Each takes one read of a ``Summary``; ``Summary().add(trace)`` makes one of a trace.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_residuals.errors import ConfigError, nearest
from attention_residuals.trace import SiteSummary

__all__ = ["SinkScores", "input_dependence", "sink_scores"]


class SinkScores(NamedTuple):
    """Three numbers for each source, since no one of them makes a sink: mass, steadiness, causal effect.

    ``score`` is the mass times the steadiness, which is 1 where the weight is the same for every token.
    ``flagged`` are the sources with over twice an equal share of weight, and less than an equal share of the
    contributions' lengths. ``effect`` is what the caller measured, NaN where nothing was.
    """

    sources: tuple[str, ...]
    mass: Float[Tensor, " S"]
    score: Float[Tensor, " S"]
    norm_share: Float[Tensor, " S"]
    effect: Float[Tensor, " S"]
    flagged: Bool[Tensor, " S"]


def sink_scores(summary: SiteSummary, effects: Mapping[str, float] | None = None) -> SinkScores:
    """Measures which sources get weight whatever the input: m (1 - variance / (m (1 - m))), m the mean share.

    A share between 0 and 1 varies by m (1 - m) at most, when it is all or nothing.

    Args:
        summary: One read over many tokens.
        effects: By source, how much a measure changes when the source is taken away, in the caller's unit.

    Returns:
        Scores from 0 (never read, or read all or not at all) to the mass (the same for every token), which is
        1 at most. NaN where there is only one source.

    Raises:
        ConfigError: An effect of a source that there is not.
    """
    sources, mass, effects = summary.source_names, summary.shares, effects or {}
    if unknown := [name for name in effects if name not in sources]:
        raise ConfigError(
            got=f"the effect of {unknown[0]!r}", expected="a source", do=nearest(unknown[0], sources)
        )
    if len(sources) == 1:
        mass = torch.full_like(mass, math.nan)
    bound = mass * (1 - mass)
    spread = torch.where(bound > 0, summary.share_variances / bound.clamp_min(1e-300), 0.0)
    return SinkScores(
        sources=sources,
        mass=mass,
        score=mass * (1 - spread).clamp(0.0, 1.0),
        norm_share=summary.norm_shares,
        effect=torch.tensor([effects.get(name, math.nan) for name in sources], dtype=torch.float64),
        flagged=(mass > 2 / len(sources)) & (summary.norm_shares < 1 / len(sources)),
    )


def input_dependence(summary: SiteSummary) -> float:
    """Measures how much routing differs from token to token: entropy of the mean less mean entropy.

    The generalised Jensen-Shannon divergence of all tokens' weights, and the mutual information of token and
    source. It is above 0 whenever weights differ at all: compare it with that of another model or text.

    Args:
        summary: One read over many tokens.

    Returns:
        Nats, from 0 (static: the same weights for every token) to ln S (each token reads one source, all
        sources alike). NaN where there is only one source.

    Source:
        Lin (1991), Divergence measures based on the Shannon entropy.
    """
    of_mean = torch.special.entr(summary.shares).sum() - summary.entropy
    return float(of_mean.clamp_min(0.0))

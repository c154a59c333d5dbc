"""How far apart the routing of two texts is, token by token, and against a control."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.stats.lexical import clr
from attention_residuals.trace import Trace

__all__ = ["PairDistance", "pair_contrast", "pair_distance"]


class PairDistance(NamedTuple):
    """How far apart two traces are at one read.

    ``divergence`` is the Jensen-Shannon divergence in nats, 0 (the same weights) to ln 2 (no source in
    common); ``distance`` is its root, which is a metric. ``change`` is the second text's clr less the
    first's, in nats, with a sign.
    """

    divergence: Float[Tensor, "B T"]
    distance: Float[Tensor, "B T"]
    change: Float[Tensor, "S B T"]


def pair_distance(first: Trace, second: Trace, site: str) -> PairDistance:
    """Compares what a read does at the same places of two texts.

    A divergence is never below 0, so noise alone is above: it says something only beside that of a control
    (``pair_contrast``). Test differences with ``change``.

    Args:
        first: One text, or several.
        second: As many, of the same lengths.
        site: A read by name.

    Raises:
        ConfigError: The traces do not align token by token, or have other sources.

    Source:
        Endres and Schindelin (2003): a new metric for probability distributions.
    """
    _require_aligned(first, second, site)
    one, other = first[site].distinct().weight_shares, second[site].distinct().weight_shares
    middle = (one + other) / 2
    entropies = [torch.special.entr(shares).sum(0) for shares in (middle, one, other)]
    divergence = (entropies[0] - (entropies[1] + entropies[2]) / 2).clamp_min(0.0)
    return PairDistance(divergence, divergence.sqrt(), clr(second, site) - clr(first, site))


def pair_contrast(first: Trace, second: Trace, control: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how much farther routing moves for one edit of a text than for a harmless one.

    Args:
        first: The text.
        second: The text with the edit that is asked about.
        control: The text with an edit of the same size that should not matter.
        site: A read by name.

    Returns:
        Difference of two divergences in nats, -ln 2 to ln 2: 0 is as far as the control, above 0 farther.

    Raises:
        ConfigError: The traces do not align token by token, or have other sources.
    """
    return pair_distance(first, second, site).divergence - pair_distance(first, control, site).divergence


def _require_aligned(first: Trace, second: Trace, site: str) -> None:
    shapes = [list(trace.tokens.shape) for trace in (first, second)]
    sources = [trace[site].distinct().source_names for trace in (first, second)]
    if shapes[0] != shapes[1] or sources[0] != sources[1]:
        raise ConfigError(
            got=f"texts {shapes[0]} and {shapes[1]} with sources {sources[0]} and {sources[1]} at {site}",
            expected="as many tokens in both, and the same sources",
            do="edit texts so that each token has its partner, and record both from one model",
        )
    if not torch.equal(first.positions, second.positions) or not torch.equal(first.real, second.real):
        raise ConfigError(
            got="tokens at other positions, or padding and special tokens at other places",
            expected="the same positions, padding and special tokens in both",
            do="edit texts so that each token has its partner",
        )

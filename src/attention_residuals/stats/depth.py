"""How far back a read reaches. The unit is the sublayer: what was written last is 1 away."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.tap import EMBEDDING
from attention_residuals.trace import SiteTrace, Trace

__all__ = ["Distance", "effective_distance", "embedding_share", "locality", "reach_back", "source_distances"]


class Distance(NamedTuple):
    """A mean distance in sublayers, and its bounds: were all of each source's writers its newest, its oldest."""

    mean: Float[Tensor, "*shape"]
    nearest: Float[Tensor, "*shape"]
    farthest: Float[Tensor, "*shape"]


def source_distances(trace: Trace, site: str) -> Distance:
    """Measures how many sublayers each distinct source is away.

    A source with several writers, such as a block, is where the mean of its writers is, weighted by the
    length of what they wrote.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Sublayers [S, B, T], from 1 (written just before the read) to the number of writers (the embedding).
    """
    read = trace[site].distinct()
    count = len(read.writers)
    held = read.membership.double().abs()
    distances = count - torch.arange(count, dtype=torch.float64)
    # So that writers of length zero have a place, too.
    norms = trace.writer_norms[:count].double().clamp_min(1e-30)
    held = held.expand(-1, -1, *norms.shape[1:]) if held.ndim == 4 else held[..., None, None]
    apart = distances[:, None, None]
    mean = (held * apart * norms).sum(1) / (held * norms).sum(1)
    nearest = torch.where(held == 0, math.inf, apart).amin(1)
    farthest = torch.where(held == 0, -math.inf, apart).amax(1)
    return Distance(mean, nearest.expand_as(mean), farthest.expand_as(mean))


def effective_distance(
    trace: Trace, site: str, *, by: Literal["weight", "norm", "projection"] = "weight"
) -> Distance:
    """Measures how far back a read looks on average.

    Args:
        trace: A recorded pass.
        site: A read by name.
        by: What counts as looking: a source's share of weight, of the contributions' lengths, or of their
            parts along the state, whatever their sign.

    Returns:
        Sublayers, from 1 (reads only what was written last) to the number of writers (only the embedding).
        NaN where there is only one source.

    Raises:
        ConfigError: Another ``by``.
    """
    read = trace[site].distinct()
    along = read.projections.abs()
    shares = {"weight": read.weight_shares, "norm": read.norm_shares, "projection": along / along.sum(0)}
    if by not in shares:
        raise ConfigError(got=f"by={by!r}", expected=f"one of {tuple(shares)}", do="'weight' is the default")
    share = shares[by].double() if len(read.source_names) > 1 else shares[by].double() * math.nan
    return Distance(*((share * distance).sum(0) for distance in source_distances(trace, site)))


def embedding_share(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how much of a read's weight is on the embedding.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Share of weight, from 0 (not read) to 1 (nothing else is read). NaN where it is no source, or the
        only one.
    """
    read = trace[site].distinct()
    if EMBEDDING not in read.source_names or len(read.source_names) == 1:
        return torch.full_like(read.state_norms, math.nan)
    return read.weight_shares[read.source_names.index(EMBEDDING)]


def locality(trace: Trace, site: str, *, last: int = 1) -> Float[Tensor, "B T"]:
    """Measures how much of a read's weight is on the newest sources.

    The newest is the one with the newest writer, and duplicates count once.

    Args:
        trace: A recorded pass.
        site: A read by name.
        last: How many sources count as the newest, 1 or more.

    Returns:
        Share of weight, from 0 (none on the newest) to 1 (all of it). NaN where there is only one source, or
        where sources have the same newest writer, as the streams of hyper-connections do.

    Raises:
        ConfigError: ``last`` is below 1.
    """
    _require_count("last", last)
    read = trace[site].distinct()
    ages = _ages(read)
    order = sorted(range(len(ages)), key=ages.__getitem__)
    if len(order) == 1 or (last < len(order) and ages[order[last - 1]] == ages[order[last]]):
        return torch.full_like(read.state_norms, math.nan)
    return read.weight_shares[order[:last]].sum(0)


def reach_back(trace: Trace, site: str, *, sublayers: int) -> Float[Tensor, "B T"]:
    """Measures how much of a read's weight is on sources all of whose writers are far back, the embedding apart.

    Args:
        trace: A recorded pass.
        site: A read by name.
        sublayers: Sources count whose newest writer is more than so many sublayers away, 1 or more.

    Returns:
        Share of weight, from 0 (reads near sources and the embedding) to 1 (far sources only). NaN where
        there is only one source.

    Raises:
        ConfigError: ``sublayers`` is below 1.
    """
    _require_count("sublayers", sublayers)
    read = trace[site].distinct()
    if len(read.source_names) == 1:
        return torch.full_like(read.state_norms, math.nan)
    far = [
        age > sublayers and name != EMBEDDING
        for age, name in zip(_ages(read), read.source_names, strict=True)
    ]
    return read.weight_shares[torch.tensor(far)].sum(0)


def _ages(read: SiteTrace) -> list[int]:
    """Counts how many sublayers the newest writer of each source is away."""
    held = read.membership.flatten(2).ne(0).any(2) if read.membership.ndim == 4 else read.membership.ne(0)
    count = len(read.writers)
    return [count - int(row.nonzero().max()) if row.any() else count for row in held]


def _require_count(name: str, value: int) -> None:
    if not is_count(value):
        raise ConfigError(got=f"{name}={value!r}", expected="1 or more", do=f"pass {name}=1")

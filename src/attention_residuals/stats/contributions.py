"""What each source and each writer adds to the state of a read: lengths, directions and vectors."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.stats.mixing import writer_weights
from attention_residuals.trace import SiteTrace, Trace
from attention_residuals.trace.reads import contribution

__all__ = [
    "coherence",
    "contributions",
    "l1_proximity",
    "norm_shares",
    "projection_shares",
    "writer_contributions",
]


def norm_shares(trace: Trace, site: str) -> Float[Tensor, "S B T"]:
    """Measures what share of the contributions' lengths each distinct source has; see ``coherence``, too.

    A length tells nothing of direction: two large contributions may cancel.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Shares that sum to 1, from 0 (adds nothing) to 1 (nothing else does). NaN where there is only one
        source.

    Source:
        Kobayashi et al. (2020), arXiv:2004.10102: attention is not only a weight.
    """
    read = trace[site].distinct()
    return read.norm_shares if len(read.source_names) > 1 else torch.full_like(read.projections, math.nan)


def coherence(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how much contributions point the same way: the state's length over the sum of theirs.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        No unit, from 0 (they cancel) to 1 (all in one direction). NaN where there is only one source.
    """
    read = trace[site].distinct()
    if len(read.source_names) == 1:
        return torch.full_like(read.state_norms, math.nan)
    return read.state_norms / read.contribution_norms.sum(0)


def projection_shares(trace: Trace, site: str) -> Float[Tensor, "S B T"]:
    """Measures what share of the state each distinct source makes: (c . h) / |h|^2.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Shares that sum to 1, without bounds: 0 is across the state, below 0 against it, above 1 more than
        all of it, which others take back. NaN where the state is zero, or there is only one source.
    """
    read = trace[site].distinct()
    return read.projections if len(read.source_names) > 1 else torch.full_like(read.projections, math.nan)


def l1_proximity(trace: Trace, site: str) -> Float[Tensor, "S B T"]:
    """Measures how near each distinct source's contribution comes to the state: |h|_1 - |h - c|_1, 0 at least.

    Args:
        trace: Recorded with ``keep="values"``.
        site: A read by name.

    Returns:
        Divided by their sum: from 0 (leaves the state as far off as nothing would) to 1 (the only one that
        comes nearer). NaN where none comes nearer, or there is only one source.

    Raises:
        ConfigError: The trace holds no values.

    Source:
        ALTI (Ferrando et al., 2022, arXiv:2203.04212), as the LLM Transparency Tool has it.
    """
    read = trace[site].distinct()
    parts = _parts(read)
    state = parts.sum(0)
    nearer = (state.abs().sum(-1) - (state - parts).abs().sum(-1)).clamp_min(0.0)
    shares = nearer / nearer.sum(0)
    return shares if len(shares) > 1 else torch.full_like(shares, math.nan)


def contributions(trace: Trace, site: str) -> Float[Tensor, "S B T D"]:
    """Returns what each distinct source adds to the state; their sum is the state.

    Args:
        trace: Recorded with ``keep="values"``.
        site: A read by name.

    Raises:
        ConfigError: The trace holds no values.
    """
    return _parts(trace[site].distinct())


def writer_contributions(trace: Trace, site: str) -> Float[Tensor, "W B T D"]:
    """Returns what each writer adds to the state, through whatever sources hold it; their sum is the state.

    Args:
        trace: Recorded with ``keep="values"``.
        site: A read by name.

    Raises:
        ConfigError: The trace holds no writes.
    """
    read = trace[site]
    return contribution(writer_weights(read), writes_of(trace)[: len(read.writers)])


def writes_of(trace: Trace) -> Float[Tensor, "W B T D"]:
    """Returns what each writer wrote.

    Raises:
        ConfigError: The trace holds none.
    """
    if trace.writes is None:
        raise _without("writes")
    return trace.writes


def _parts(read: SiteTrace) -> Float[Tensor, "S B T D"]:
    if read.values is None:
        raise _without("values")
    return contribution(read.weights, read.values)


def _without(what: str) -> ConfigError:
    return ConfigError(
        got=f"a trace without {what}",
        expected=f"one that holds the {what} themselves",
        do='record it with keep="values"',
    )

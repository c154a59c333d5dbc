"""How spread the weights of a read are."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.trace import Trace

__all__ = ["normalised_entropy", "perplexity", "uniform_excess"]


def normalised_entropy(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how spread a read's weights are: 0 reads one source, 1 reads all alike.

    The entropy is divided by the logarithm of the number of distinct sources, so that sites compare. Weights
    that are no shares are taken without their signs and divided by their sum. NaN where there is only one
    source.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        No unit, 0 to 1.
    """
    shares = trace[site].distinct().weight_shares
    if len(shares) == 1:
        return torch.full_like(shares[0], math.nan)
    entropies: Tensor = torch.special.entr(shares).sum(0)
    return entropies / math.log(len(shares))


def perplexity(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how many sources a read uses: the number that would have the same entropy, used alike.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Sources, from 1 (one source) to the number of distinct sources (all alike). NaN where there is only
        one.
    """
    shares = trace[site].distinct().weight_shares
    if len(shares) == 1:
        return torch.full_like(shares[0], math.nan)
    entropies: Tensor = torch.special.entr(shares).sum(0)
    return entropies.exp()


def uniform_excess(trace: Trace, site: str) -> Float[Tensor, "S B T"]:
    """Measures how much more each distinct source gets than an equal share.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Share of weight, from -1/S (never read) to 1 - 1/S (the only one read); 0 is an equal share, and the
        numbers of a token sum to 0. NaN where there is only one source.
    """
    shares = trace[site].distinct().weight_shares
    return shares - 1 / len(shares) if len(shares) > 1 else torch.full_like(shares, math.nan)

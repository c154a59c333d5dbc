"""How much of routing a look at the token alone explains."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.trace import Trace

__all__ = ["LexicalBaseline", "clr", "lexical_baseline"]


class LexicalBaseline(NamedTuple):
    """What token ids explain of one read. All numbers are of tokens whose id occurs twice or more.

    ``held_out`` is the share of the variance of clr that the mean of the *other* tokens of the same id
    predicts: 1 is all of it, 0 nothing, below 0 worse than the mean of all others. ``in_sample`` is that of
    means that include the token itself, 0 to 1, too high where ids are rare. ``divergence`` is the share
    between ids of the generalised Jensen-Shannon divergence, in sample. ``covered`` is the share of the real
    tokens that the numbers are of.
    """

    held_out: float
    in_sample: float
    divergence: float
    covered: float


def clr(trace: Trace, site: str) -> Float[Tensor, "S B T"]:
    """Returns centred log-ratios of a read's weights: ln of each share, less the mean of the logarithms.

    Linear statistics belong on this scale. Under a softmax they are the logits less their mean. A share of 0
    counts as the smallest number of its dtype.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Nats, without bounds; 0 is the geometric mean of the shares, and a token's numbers sum to 0. NaN where
        there is only one source.
    """
    shares = trace[site].distinct().weight_shares
    logarithms = shares.clamp_min(torch.finfo(shares.dtype).tiny).log()
    return logarithms - logarithms.mean(0) if len(shares) > 1 else torch.full_like(shares, math.nan)


def lexical_baseline(trace: Trace, site: str) -> LexicalBaseline:
    """Measures how much of a read's routing a table of token ids predicts.

    The embedding is a table of token ids, so its score is one, too: what is said of routing must beat this.
    Tokens of one text are not independent; take many texts.

    Args:
        trace: A recorded pass.
        site: A read by name.

    Returns:
        Shares; NaN where no id occurs twice, weights never differ, or there is only one source.
    """
    ids = trace.tokens[trace.real]
    _, group, counts = ids.unique(return_inverse=True, return_counts=True)
    repeated = counts[group] > 1
    covered = repeated.double().mean().item()
    if len(trace[site].distinct().source_names) == 1 or not repeated.any():
        return LexicalBaseline(math.nan, math.nan, math.nan, covered)
    _, group, counts = ids[repeated].unique(return_inverse=True, return_counts=True)
    ratios = clr(trace, site)[:, trace.real][:, repeated].double()
    shares = trace[site].distinct().weight_shares[:, trace.real][:, repeated].double()

    def group_means(numbers: Tensor) -> Tensor:
        sums = numbers.new_zeros(len(numbers), len(counts)).index_add_(1, group, numbers)
        means: Tensor = sums / counts
        return means

    # Without the token itself, its distance from a mean of n is n / (n - 1) times as long.
    size, total = counts[group].double(), len(group)
    within = (ratios - group_means(ratios)[:, group]).square().sum(0)
    around = (ratios - ratios.mean(1, keepdim=True)).square().sum(0)
    held_out = (within * (size / (size - 1)).square()).sum() / (around.sum() * (total / (total - 1)) ** 2)
    overall = _entropy(shares.mean(1)) - _entropy(shares).mean()
    inside = (_entropy(group_means(shares)) * counts).sum() / total - _entropy(shares).mean()
    varies = around.sum() > 1e-20 * ratios.square().sum().clamp_min(1e-300)
    if not varies:
        return LexicalBaseline(math.nan, math.nan, math.nan, covered)
    return LexicalBaseline(
        held_out=(1 - held_out).item(),
        in_sample=(1 - within.sum() / around.sum()).item(),
        divergence=(1 - inside / overall).item(),
        covered=covered,
    )


def _entropy(shares: Float[Tensor, "S *rest"]) -> Float[Tensor, "*rest"]:
    entropy: Tensor = torch.special.entr(shares).sum(0)
    return entropy

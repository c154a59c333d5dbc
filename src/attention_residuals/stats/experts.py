"""Two routings beside each other: which experts a token is sent to, and which sources it reads."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, nearest
from attention_residuals.trace import Trace, source_identity

__all__ = ["ExpertRouting", "expert_loads", "routing_by_expert", "tokens_of_expert"]


class ExpertRouting(NamedTuple):
    """What a site reads, on average over the tokens that each expert gets.

    A row is NaN where an expert got no token.
    """

    sources: tuple[str, ...]
    weights: Float[Tensor, "E S"]
    num_tokens: Int[Tensor, " E"]


def tokens_of_expert(trace: Trace, writer: str, expert: int) -> Bool[Tensor, "B T"]:
    """Marks the real tokens that a sublayer sends to an expert, to condition other statistics on.

    Args:
        trace: Of a model with experts.
        writer: The sublayer, such as ``"L3.mlp"``.
        expert: Its number, from 0.

    Raises:
        ConfigError: The sublayer has no experts, or not so many.
    """
    chosen, num_experts = _experts(trace, writer)
    if not 0 <= expert < num_experts:
        raise ConfigError(
            got=f"expert {expert} of {writer}", expected=f"0 to {num_experts - 1}", do="name one of them"
        )
    return (chosen == expert).any(-1) & trace.real


def expert_loads(trace: Trace) -> dict[str, Float[Tensor, " E"]]:
    """Counts which share of the choices of a sublayer falls on each of its experts, over real tokens.

    Returns:
        By writer; each from 0 (never chosen) to 1 over the number of experts a token is sent to (always), and
        all together 1. Balanced experts have 1 / E each.
    """
    return {
        writer: torch.bincount(chosen[trace.real].flatten().long(), minlength=trace.num_experts[writer])
        / max(1, chosen[trace.real].numel())
        for writer, chosen in trace.experts.items()
    }


def routing_by_expert(trace: Trace, site: str, writer: str | None = None) -> ExpertRouting:
    """Averages what a site reads over the tokens of each expert; the weights of duplicate sources are added.

    Where the rows are alike, the two routings have nothing to do with each other.

    Args:
        trace: Of a model with experts.
        site: The read, such as ``"L4.attention"``.
        writer: The sublayer whose experts count; by default that of the site.

    Raises:
        ConfigError: There is no such site, or the sublayer has no experts.
    """
    read = trace[site].distinct()
    chosen, num_experts = _experts(trace, read.site if writer is None else writer)
    weights = read.token_weights[:, trace.real]
    sent = torch.zeros(weights.shape[1], num_experts, dtype=weights.dtype)
    sent.scatter_(1, chosen[trace.real].long(), 1.0)
    num_tokens = sent.sum(0)
    means = (weights @ sent / num_tokens).T
    return ExpertRouting(tuple(map(source_identity, read.source_names)), means, num_tokens.long())


def _experts(trace: Trace, writer: str) -> tuple[Tensor, int]:
    if writer not in trace.experts:
        raise ConfigError(
            got=f"the experts of {writer!r}",
            expected="a sublayer that chooses experts, in a trace of a model that has some",
            do=nearest(writer, trace.experts) if trace.experts else "record a Kimi Linear model",
        )
    return trace.experts[writer], trace.num_experts[writer]

"""Where sites read, on average and token by token, and how large the state grows."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.trace import SiteTrace, Trace, source_identity

__all__ = [
    "Routing",
    "average_routing",
    "output_magnitude",
    "site_means",
    "token_routing",
]


class Routing(NamedTuple):
    """Weights by site (rows) and source (columns), sources by identity.

    A cell is NaN where the site cannot read the source. ``is_open`` marks a block that was still open when
    the site read it.
    """

    sites: tuple[str, ...]
    sources: tuple[str, ...]
    weights: Float[Tensor, "R C"]
    is_open: Bool[Tensor, "R C"]


def average_routing(
    trace: Trace, kind: str | None = None, *, where: Bool[Tensor, "B T"] | None = None
) -> Routing:
    """Averages the weights over all real tokens (paper, Fig. 8); the weights of duplicate sources are added.

    Args:
        trace: A recorded pass.
        kind: ``"attention"``, ``"mlp"`` or ``"output"``, or what ``trace.kinds`` says of sublayers, such as
            ``"KDA"`` or ``"MoE"``: which sites become rows; all of them by default.
        where: Of the real tokens, only those marked here, such as ``tokens_of_expert(trace, "L3.mlp", 5)``.

    Returns:
        Weights from 0 (never read) to 1 (the only thing read); each row sums to 1.

    Raises:
        ConfigError: The trace has no sites of that kind, or no token is left.
    """
    counted = _counted(trace, where)
    return _routing([(site, site.token_weights[:, counted].mean(1)) for site in _sites(trace, kind)])


def token_routing(trace: Trace, kind: str, *, row: int, token: int) -> Routing:
    """Returns the weights of one token at every site of a kind.

    Raises:
        ConfigError: The trace has no sites of that kind.
    """
    return _routing([(site, site.token_weights[:, row, token]) for site in _sites(trace, kind)])


def site_means(
    trace: Trace,
    statistic: Callable[[Trace, str], Float[Tensor, "B T"]],
    *,
    kind: str | None = None,
    where: Bool[Tensor, "B T"] | None = None,
) -> dict[str, float]:
    """Averages a statistic over the real tokens of each read that has a choice, two distinct sources or more.

    Args:
        trace: A recorded pass.
        statistic: Any that gives one number a token, such as ``normalised_entropy``; options through
            ``functools.partial``.
        kind: Which sites, as for ``average_routing``.
        where: Which of the real tokens, as for ``average_routing``.

    Returns:
        By the read's name.

    Raises:
        ConfigError: The trace has no sites of that kind, or no token is left.

    Example:
        >>> from attention_residuals import Decoder, presets, record
        >>> from attention_residuals.stats import normalised_entropy
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=9)), torch.tensor([[5, 6]]))
        >>> sorted(site_means(trace, normalised_entropy))
        ['L0.mlp', 'L1.attention', 'L1.mlp', 'output']
    """
    counted = _counted(trace, where)
    return {
        site.name: statistic(trace, site.name)[counted].mean().item()
        for site in _sites(trace, kind)
        if len(site.source_names) > 1
    }


def output_magnitude(trace: Trace) -> tuple[float, ...]:
    """Measures the state after each layer (paper, Fig. 5b).

    The state is the newest source that the next layer's attention (the output, after the last layer) can
    read: the stream of a standard model, the sum so far of the newest block under attention residuals.

    Returns:
        For each layer the root mean square over channels and real tokens; above 0, no upper end.
    """
    first_reads = {site.site: site for site in reversed(trace.sites) if not site.site.endswith(".mlp")}
    readers = list(reversed(first_reads.values()))[1:]
    squares = [site.source_norms[-1][trace.real].square().mean() / trace.width for site in readers]
    return tuple(square.sqrt().item() for square in squares)


def _sites(trace: Trace, kind: str | None) -> list[SiteTrace]:
    sites = [
        site.distinct()
        for site in trace
        if kind in (None, site.site, site.site.rpartition(".")[2], trace.kinds.get(site.site))
    ]
    if not sites:
        words = ("attention", "mlp", "output", *dict.fromkeys(trace.kinds.values()))
        raise ConfigError(
            got=f"kind {kind!r}", expected="sites of that kind", do=f"use one of {', '.join(words)}"
        )
    return sites


def _counted(trace: Trace, where: Tensor | None) -> Bool[Tensor, "B T"]:
    counted = trace.real if where is None else trace.real & where
    if not counted.any():
        raise ConfigError(
            got="no token to average over",
            expected="at least one that is neither padding nor special, nor left out by where",
            do="condition on an expert that has tokens, or record more of them",
        )
    return counted


def _routing(rows: list[tuple[SiteTrace, Tensor]]) -> Routing:
    columns: dict[str, int] = {}
    for site, _ in rows:
        for name in site.source_names:
            columns.setdefault(source_identity(name), len(columns))
    weights = torch.full((len(rows), len(columns)), math.nan)
    is_open = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for number, (site, mean) in enumerate(rows):
        for name, weight in zip(site.source_names, mean, strict=True):
            weights[number, columns[source_identity(name)]] = weight
            is_open[number, columns[source_identity(name)]] = ".open@" in name
    return Routing(tuple(site.name for site, _ in rows), tuple(columns), weights, is_open)

"""Statistics of traces: where sites read, on average, and how large the state grows."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.layers.tap import EMBEDDING
from attention_residuals.trace import SiteTrace, Trace

__all__ = [
    "Routing",
    "average_routing",
    "embedding_share",
    "normalised_entropy",
    "output_magnitude",
    "real_tokens",
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


def real_tokens(trace: Trace) -> Bool[Tensor, "B T"]:
    """Tells which tokens are real: all where the trace has no mask."""
    return torch.ones_like(trace.tokens, dtype=torch.bool) if trace.mask is None else trace.mask


def average_routing(trace: Trace, kind: str) -> Routing:
    """Averages the weights over all real tokens (paper, Fig. 8).

    Args:
        trace: A recorded pass.
        kind: ``"attention"``, ``"mlp"`` or ``"output"``: which sites become rows.

    Returns:
        Weights from 0 (never read) to 1 (the only thing read); each row sums to 1.

    Raises:
        ConfigError: The trace has no sites of that kind.
    """
    return _routing(
        [(site, site.token_weights[:, real_tokens(trace)].mean(1)) for site in _sites(trace, kind)]
    )


def token_routing(trace: Trace, kind: str, *, row: int, token: int) -> Routing:
    """Returns the weights of one token at every site of a kind.

    Raises:
        ConfigError: The trace has no sites of that kind.
    """
    return _routing([(site, site.token_weights[:, row, token]) for site in _sites(trace, kind)])


def normalised_entropy(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how spread a site's weights are: 0 reads one source, 1 reads all alike.

    The entropy is divided by the logarithm of the number of sources, so that sites compare. NaN where
    there is only one source.
    """
    weights = trace[site].token_weights
    if len(weights) == 1:
        return torch.full_like(weights[0], math.nan)
    entropies: Tensor = torch.special.entr(weights).sum(0)
    return entropies / math.log(len(weights))


def embedding_share(trace: Trace, site: str) -> Float[Tensor, "B T"]:
    """Measures how much of a site's weight is on the embedding, 0 to 1; NaN where it is no source."""
    names = trace[site].source_names
    if EMBEDDING not in names:
        return torch.full_like(trace[site].token_weights[0], math.nan)
    return trace[site].token_weights[names.index(EMBEDDING)]


def output_magnitude(trace: Trace) -> tuple[float, ...]:
    """Measures the state after each layer (paper, Fig. 5b).

    The state is the newest source that the next layer's attention (the output, after the last layer) can
    read: the stream of a standard model, the sum so far of the newest block under attention residuals.

    Returns:
        For each layer the root mean square over channels and real tokens; above 0, no upper end.
    """
    first_reads = {site.site: site for site in reversed(trace.sites) if not site.site.endswith(".mlp")}
    readers = list(reversed(first_reads.values()))[1:]
    squares = [site.source_norms[-1][real_tokens(trace)].square().mean() / trace.width for site in readers]
    return tuple(square.sqrt().item() for square in squares)


def _sites(trace: Trace, kind: str) -> list[SiteTrace]:
    sites = [site for site in trace.sites if site.site == kind or site.site.endswith(f".{kind}")]
    if not sites:
        raise ConfigError(
            got=f"kind {kind!r}", expected="sites of that kind", do="use 'attention', 'mlp' or 'output'"
        )
    return sites


def _routing(rows: list[tuple[SiteTrace, Tensor]]) -> Routing:
    columns: dict[str, int] = {}
    for site, _ in rows:
        for name in site.source_names:
            columns.setdefault(_identity(name), len(columns))
    weights = torch.full((len(rows), len(columns)), math.nan)
    is_open = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for number, (site, mean) in enumerate(rows):
        for name, weight in zip(site.source_names, mean, strict=True):
            weights[number, columns[_identity(name)]] = weight
            is_open[number, columns[_identity(name)]] = ".open@" in name
    return Routing(tuple(site.name for site, _ in rows), tuple(columns), weights, is_open)


def _identity(source_name: str) -> str:
    """An open block is the same block as when it is finished."""
    return source_name.split(".open@")[0]

"""Which readable number tells what an edge does: rank correlations with measured effects, with intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats.contributions import norm_shares, projection_shares
from attention_residuals.stats.routing import Routing
from attention_residuals.trace import Trace, source_identity
from attention_residuals.trace.sweeps import Swept

__all__ = ["Agreement", "edge_agreement", "edge_effects", "rank_correlation"]

Numbers = npt.NDArray[np.float64]


class Agreement(NamedTuple):
    """How far one number's ranking of edges is that of their effects."""

    correlation: float
    """Spearman's, -1 to 1: 1 ranks alike, 0 tells nothing, -1 ranks the other way round; NaN for constants."""
    low: float
    high: float
    """The interval of 95 %, from a bootstrap over edges."""
    num_edges: int


def rank_correlation(
    readable: npt.ArrayLike, effects: npt.ArrayLike, *, num_resamples: int = 10_000, seed: int = 0
) -> Agreement:
    """Correlates the ranks of a readable number (weight, norm share, projection share) with those of effects.

    Edges of one model are no independent draws, so the interval speaks of these edges on this text, and not
    of other models.

    Args:
        readable: One number for each edge.
        effects: What an edit of that edge did, in the same order.
        num_resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        ShapeError: Other than two rows of the same length, or fewer than 4 edges.

    Example:
        >>> rank_correlation([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 9.0]).correlation
        1.0
    """
    one, other = np.asarray(readable, dtype=np.float64), np.asarray(effects, dtype=np.float64)
    if one.ndim != 1 or one.shape != other.shape or len(one) < 4:
        raise ShapeError(
            got=f"numbers of shape {list(one.shape)} and effects of shape {list(other.shape)}",
            expected="one of each for every edge, 4 edges or more",
            do="take both from the same sweep",
        )
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(len(one), size=len(one)) for _ in range(num_resamples)]
    resampled = np.array([_spearman(one[rows], other[rows]) for rows in drawn])
    low, high = np.nanpercentile(resampled, [2.5, 97.5]) if np.isfinite(resampled).any() else (np.nan, np.nan)
    return Agreement(_spearman(one, other), float(low), float(high), len(one))


def _spearman(one: Numbers, other: Numbers) -> float:
    a, b = _ranks(one), _ranks(other)
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def _ranks(numbers: Numbers) -> Numbers:
    """Ranks from 1; equal numbers share the mean of their ranks."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def edge_effects(swept: Sequence[Swept]) -> Routing:
    """Arranges a sweep over edges by site (rows) and source (columns), as average routing is.

    Args:
        swept: Of ``every_edge``: each entry drops one source at one site.

    Returns:
        Mean KL(clean || edited) in nats, 0 or more; NaN where there is no edge to drop.

    Raises:
        ConfigError: An entry that is no single dropped edge.
    """
    cells: dict[tuple[str, str], float] = {}
    for entry in swept:
        edit = entry.edits[0]
        source = edit.get("sources")
        if len(entry.edits) != 1 or edit["type"] != "Drop" or not isinstance(source, str):
            raise ConfigError(
                got=f"a sweep with {[one['type'] for one in entry.edits]}",
                expected="entries that each drop one source at one site",
                do="sweep(model, tokens, every_edge(model))",
            )
        site = edit["sites"] if edit.get("part") in (None, "in") else f"{edit['sites']}.{edit['part']}"
        cells[site, source] = entry.divergence
    sites = tuple(dict.fromkeys(site for site, _ in cells))
    sources = tuple(dict.fromkeys(source_identity(source) for _, source in cells))
    effects = torch.full((len(sites), len(sources)), math.nan)
    is_open = torch.zeros(len(sites), len(sources), dtype=torch.bool)
    for (site, source), effect in cells.items():
        place = sites.index(site), sources.index(source_identity(source))
        effects[place], is_open[place] = effect, ".open@" in source
    return Routing(sites, sources, effects, is_open)


def edge_agreement(
    trace: Trace, swept: Sequence[Swept], *, num_resamples: int = 10_000
) -> dict[str, Agreement]:
    """Tells how well each readable number ranks edges by what dropping them does.

    Args:
        trace: Of the texts that were swept, or of others like them.
        swept: Of ``every_edge``.
        num_resamples: Of the bootstrap.

    Returns:
        By the name of the number: the mean weight, norm share and projection share of each edge.

    Example:
        >>> from attention_residuals import Decoder, presets, record
        >>> from attention_residuals.trace.sweeps import every_edge, sweep
        >>> model, tokens = Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7, 8]])
        >>> swept = sweep(model, tokens, every_edge(model), progress=False)
        >>> sorted(edge_agreement(record(model, tokens), swept, num_resamples=100))
        ['norm share', 'projection share', 'weight']
    """
    effects = edge_effects(swept)
    numbers: dict[str, list[float]] = {"weight": [], "norm share": [], "projection share": []}
    measured = []
    for row, site in enumerate(effects.sites):
        read = trace[site]
        by_source = {
            "weight": read.token_weights,
            "norm share": norm_shares(trace, site),
            "projection share": projection_shares(trace, site),
        }
        for source, name in enumerate(read.source_names):
            effect = effects.weights[row, effects.sources.index(source_identity(name))].item()
            if math.isnan(effect):
                continue
            measured.append(effect)
            for what, values in by_source.items():
                numbers[what].append(values[source][trace.real].mean().item())
    return {
        what: rank_correlation(listed, measured, num_resamples=num_resamples)
        for what, listed in numbers.items()
    }

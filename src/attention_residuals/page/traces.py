"""One trace as the document that a page shows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_residuals.page.arrays import encoded, require_finite
from attention_residuals.stats import (
    coherence,
    effective_distance,
    embedding_share,
    norm_shares,
    normalised_entropy,
    projection_shares,
    writer_weights,
)
from attention_residuals.trace import SiteTrace, Trace, source_identity

__all__ = ["mask_of", "trace_payload"]

STATISTICS: dict[str, Callable[[Trace, str], Tensor]] = {
    "entropy": normalised_entropy,
    "distance": lambda trace, site: effective_distance(trace, site).mean,
    "coherence": coherence,
    "embedding_share": embedding_share,
}
"""Numbers of a site at a token, by the name that the page has for them."""


def mask_of(trace: Trace) -> Tensor:
    """Tells which tokens are no padding."""
    return torch.ones_like(trace.tokens, dtype=torch.bool) if trace.mask is None else trace.mask


def trace_payload(trace: Trace, name: str) -> dict[str, Any]:
    """Makes the part of the document that one trace is.

    Duplicate sources of a site are one, as in statistics. ``arrays`` holds ``weight`` [N, B, T] (a row for
    each source of each site, from the site's ``first`` on; rows of writers' weights that no source has come
    after those), ``norm_share`` and ``projection_share`` (the same rows, without the last), statistics
    [sites, B, T] and ``writer_norm`` [W, B, T]. ``writer_rows`` names for each site and writer the row of
    its writer weight; -1 where it has not written.

    Args:
        trace: Duplicate sources are shown as one.
        name: For people.

    Raises:
        NonFiniteError: NaN or infinity among weights or norms.
    """
    real = mask_of(trace)
    sites = [site.distinct() for site in trace]
    pool = _Rows()
    firsts = []
    for site in sites:
        weights = require_finite(site.token_weights.float(), real, f"a weight at {site.name}:")
        firsts.append(pool.extend(weights))
        require_finite(site.contribution_norms, real, f"the norm of a contribution at {site.name}:")
    num_sources = len(pool.rows)
    writer_rows = [_writer_rows(site, pool, len(trace.writers)) for site in trace]
    norms = {site.name: require_finite(site.state_norms, real, f"the norm of {site.name}") for site in sites}
    for writer, norm in zip(trace.writers, trace.writer_norms, strict=True):
        require_finite(norm, real, f"the norm of what {writer} wrote:")
    names = [site.name for site in sites]
    shares = {"norm_share": norm_shares, "projection_share": projection_shares}
    arrays = {
        "weight": torch.stack(pool.rows),
        **{key: torch.cat([share(trace, name) for name in names]) for key, share in shares.items()},
        **{key: torch.stack([one(trace, name) for name in names]) for key, one in STATISTICS.items()},
        "state_norm": torch.stack([norms[name] for name in names]),
        "writer_norm": trace.writer_norms,
    }
    return {
        "name": name,
        "rule": trace.rule,
        "semantics": trace.semantics,
        "cautions": _cautions(trace),
        "about": {key: str(value) for key, value in trace.about.items()},
        "width": trace.width,
        "tokens": _tokens(trace),
        "sites": [_site(site, first, whole) for site, first, whole in zip(sites, firsts, trace, strict=True)],
        "sources": list(dict.fromkeys(source_identity(name) for site in sites for name in site.source_names)),
        "num_source_rows": num_sources,
        "writers": list(trace.writers),
        "writer_rows": writer_rows,
        "arrays": {
            key: encoded(array.float().masked_fill(~real, torch.nan)) for key, array in arrays.items()
        },
    }


class _Rows:
    """Rows [B, T] of weights; one that is there already is not added again where it may be shared."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self._numbers: dict[bytes, int] = {}

    def extend(self, rows: Tensor) -> int:
        """Adds rows one after the other, and returns the number of the first."""
        first = len(self.rows)
        for row in rows:
            self._numbers.setdefault(row.numpy().tobytes(), len(self.rows))
            self.rows.append(row)
        return first

    def number_of(self, row: Tensor) -> int:
        """Returns the number of a row that has the same bits, which is added if there is none."""
        key = row.numpy().tobytes()
        return self._numbers[key] if key in self._numbers else self.extend(row[None])


def _writer_rows(site: SiteTrace, pool: _Rows, num_writers: int) -> list[int]:
    weights = writer_weights(site).float()
    weights = weights if weights.ndim == 3 else weights.mean(-1)
    rows = [pool.number_of(row.contiguous()) for row in weights]
    return rows + [-1] * (num_writers - len(rows))


def _site(site: SiteTrace, first: int, whole: SiteTrace) -> dict[str, Any]:
    place, _, kind = site.site.rpartition(".")
    return {
        "name": site.name,
        "site": site.site,
        "part": site.part,
        "kind": kind,
        "layer": int(place[1:]) if place else None,
        "first": first,
        "sources": [
            {"name": name, "identity": source_identity(name), "open": ".open@" in name}
            for name in site.source_names
        ],
        "merged": [
            [whole.source_names[number], whole.source_names[same]]
            for number, same in enumerate(whole.same_as)
            if same != number
        ],
        "groups": whole.weights.shape[3] if whole.weights.ndim == 4 else 1,
    }


def _tokens(trace: Trace) -> dict[str, Any]:
    return {
        "ids": trace.tokens.tolist(),
        "texts": [list(row) for row in trace.token_texts] or None,
        "positions": trace.positions.tolist(),
        "mask": mask_of(trace).int().tolist(),
        "real": trace.real.int().tolist(),
    }


def _cautions(trace: Trace) -> list[str]:
    groups = max(site.weights.shape[3] if site.weights.ndim == 4 else 1 for site in trace)
    averaged = f"weights are the mean over {groups} groups of channels, which have weights of their own"
    return [*trace.cautions, *([averaged] if groups > 1 else [])]

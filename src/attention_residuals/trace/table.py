"""Traces as tables: lines of text, HTML, and columns for pandas and xarray."""

import html
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.trace.site import SiteTrace, source_identity

__all__ = ["Row", "as_html", "dataset", "frame", "rows_of"]


class Row(NamedTuple):
    """A site in a table: its largest weights in the order of the sources, and how many are left out."""

    name: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    num_left: int

    @property
    def rest(self) -> str:
        """Says how many are left out, nothing where none is."""
        return f"({self.num_left} more)" if self.num_left else ""


def rows_of(
    sites: Sequence[SiteTrace], weights_of: Callable[[Tensor], Tensor], num_sources: int
) -> list[Row]:
    """Takes the largest weights of each site.

    Args:
        sites: In order.
        weights_of: Makes one number a source of a site's weights, [S, B, T] to [S].
        num_sources: At most so many a site.
    """
    rows = []
    for site in sites:
        weights = weights_of(site.token_weights)
        shown = sorted(torch.topk(weights, min(num_sources, len(weights))).indices.tolist())
        rows.append(
            Row(
                site.name,
                tuple(site.source_names[source] for source in shown),
                tuple(weights[shown].tolist()),
                len(weights) - len(shown),
            )
        )
    return rows


def as_html(title: str, cautions: Sequence[str], rows: Sequence[Row], texts: Sequence[str]) -> str:
    """Writes rows as an HTML table; texts and names are data, and never markup.

    Args:
        title: What the table shows.
        cautions: A paragraph each.
        rows: A line each.
        texts: What the model read, a paragraph each.
    """
    lines = []
    for row in rows:
        cells = (
            f"{html.escape(source)} {weight:.2f}"
            for source, weight in zip(row.sources, row.weights, strict=True)
        )
        lines.append(
            f"<tr><th>{html.escape(row.name)}</th><td>{' &nbsp; '.join(cells)} {html.escape(row.rest)}</td></tr>"
        )
    paragraphs = "".join(f"<p>caution: {html.escape(caution)}</p>" for caution in cautions)
    shown = "".join(f"<p><code>{html.escape(text)}</code></p>" for text in texts)
    head = "<tr><th>site</th><th>sources and their weights</th></tr>"
    return (
        f"<div><p><b>{html.escape(title)}</b></p>{paragraphs}"
        f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>{shown}</div>"
    )


def frame(
    sites: Sequence[SiteTrace],
    tokens: Int[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    real: Bool[Tensor, "B T"],
    token_texts: Sequence[Sequence[str]],
) -> Any:
    """Makes a pandas.DataFrame, a line for each site, source and token.

    Raises:
        ConfigError: pandas is not installed.
    """
    pd = _package("pandas")
    batch, length = tokens.shape
    texts = np.array(token_texts, dtype=object).reshape(-1) if token_texts else np.full(batch * length, "")
    token = {
        "row": np.arange(batch).repeat(length),
        "position": positions.flatten().numpy(),
        "token_id": tokens.flatten().numpy(),
        "token": texts,
        "real": real.flatten().numpy(),
    }
    parts = []
    for site in sites:
        count = len(site.source_names)
        names = {"site": site.site, "part": site.part}
        columns = {name: np.tile(column, count) for name, column in token.items()}
        source = {"source": np.array(site.source_names, dtype=object).repeat(batch * length)}
        numbers = {name: tensor.flatten().numpy() for name, tensor in _numbers(site).items()}
        parts.append(pd.DataFrame({**source, **columns, **numbers}).assign(**names))
    order = ["site", "part", "source", *token, *_numbers(sites[0])]
    return pd.concat(parts, ignore_index=True)[order]


def dataset(
    sites: Sequence[SiteTrace],
    tokens: Int[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    real: Bool[Tensor, "B T"],
    token_texts: Sequence[Sequence[str]],
) -> Any:
    """Makes an xarray.Dataset with axes read, source, row and token; NaN where a read has no such source.

    Raises:
        ConfigError: xarray is not installed.
    """
    xr = _package("xarray")
    columns: dict[str, int] = {}
    for site in sites:
        for name in site.source_names:
            columns.setdefault(source_identity(name), len(columns))
    shape = (len(sites), len(columns), *tokens.shape)
    arrays: dict[str, Any] = {name: np.full(shape, np.nan) for name in _numbers(sites[0])}
    for number, site in enumerate(sites):
        where = [columns[source_identity(name)] for name in site.source_names]
        for name, tensor in _numbers(site).items():
            arrays[name][number, where] = tensor.numpy()
    by_token = {"token_id": tokens, "position": positions, "real": real}
    coordinates: dict[str, Any] = {
        name: (("row", "token"), tensor.numpy()) for name, tensor in by_token.items()
    }
    if token_texts:
        coordinates["text"] = (("row", "token"), np.array(token_texts, dtype=object))
    return xr.Dataset(
        {name: (("read", "source", "row", "token"), array) for name, array in arrays.items()},
        coords={"read": [site.name for site in sites], "source": list(columns), **coordinates},
    )


def _numbers(site: SiteTrace) -> dict[str, Tensor]:
    """Returns what tables hold of a read, groups of channels averaged; logits are NaN where it has none."""
    logits = torch.full_like(site.token_weights, torch.nan) if site.logits is None else site.logits
    return {
        "weight": site.token_weights,
        "logit": logits if logits.ndim == 3 else logits.mean(-1),
        "norm_share": site.norm_shares,
        "projection_share": site.projections,
    }


def _package(name: str) -> Any:
    """Imports a package that only these tables need."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            got=f"no package {name}",
            expected=f"{name}, which nothing else here needs",
            do=f"run: pip install {name}",
        ) from error

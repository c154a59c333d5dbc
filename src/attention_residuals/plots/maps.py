"""Maps of weights: where sites read on average, and where one site reads token by token."""

from collections.abc import Iterable, Mapping, Sequence

from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import style
from attention_residuals.plots.cells import MAX_WRITTEN, SHARES, add_scale, draw_cells
from attention_residuals.stats import Routing
from attention_residuals.trace import SiteTrace, Trace

__all__ = ["routing_map", "token_map"]

_MAX_TOKENS = 64
"""More columns cannot be read."""

_MIN_WIDTH, _KEY = 7.0, 0.5
"""In inches: what the key needs."""


def routing_map(panels: Mapping[str, Routing], *, title: str, footer: str) -> Figure:
    """Draws which sites (rows) read which sources (columns), all panels on one scale from 0 to 1.

    Cells that a site cannot read are hatched; blocks that were open when read are outlined. Small maps have
    their weights written in. Panels stand side by side, or below each other where they are wide.

    Args:
        panels: By the panel's title, such as ``{"attention sites": average_routing(trace, "attention")}``.
        title: What the figure shows.
        footer: What it is from: number of tokens, dtype, checkpoint.

    Raises:
        ConfigError: No panel, or weights outside of 0 to 1.
        NonFiniteError: A site whose weights are all NaN.

    Source:
        Attention Residuals (arXiv:2603.15031), Fig. 8.

    Example:
        >>> import torch
        >>> from attention_residuals.models import Decoder, presets
        >>> from attention_residuals.stats import average_routing
        >>> from attention_residuals.trace import record
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> figure = routing_map({"MLPs": average_routing(trace, "mlp")}, title="Routing", footer="3 tokens")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['L0.mlp', 'L1.mlp']
    """
    if not panels:
        raise ConfigError(
            got="no panels", expected="one or more", do='pass {"MLP sites": average_routing(...)}'
        )
    for name, routing in panels.items():
        _check_weights(name, routing.weights)
    rows = [len(routing.sites) for routing in panels.values()]
    columns = [len(routing.sources) for routing in panels.values()]
    stacked = sum(columns) > 24 or len(set(rows)) > 1
    cell = 0.42 if max(*rows, *columns) <= MAX_WRITTEN else 0.2
    site_room = 0.3 + _room(site for routing in panels.values() for site in routing.sites)
    source_room = _room(source for routing in panels.values() for source in routing.sources)
    beside, below = (1, len(panels)) if stacked else (len(panels), 1)
    most = max(columns) if stacked else sum(columns)
    width = max(_MIN_WIDTH, cell * most + site_room * beside)
    level = source_room < (width - site_room * beside) / most
    with style.applied():
        figure = style.new_figure(
            title,
            footer,
            width=width,
            body=cell * sum(rows if stacked else rows[:1]) + (0.7 + (0.2 if level else source_room)) * below,
            key=_KEY,
        )
        ratios = {"height_ratios": rows} if stacked else {"width_ratios": columns}
        grid = figure.subplots(below, beside, squeeze=False, gridspec_kw=ratios)
        for axes, (name, routing) in zip(grid.flat, panels.items(), strict=True):
            _draw_routing(axes, name, routing)
            axes.tick_params(axis="x", labelrotation=0 if level else 90)
        add_scale(figure, SHARES)
        _add_meanings(figure, list(panels.values()))
    return figure


def token_map(
    trace: Trace, *, row: int, sites: Sequence[str], title: str, footer: str, tokens: range | None = None
) -> Figure:
    """Draws what a few sites read at each token of one text: a panel for each site, a column for each token.

    Spaces and line ends in tokens are visible; without texts, columns have the tokens' ids.

    Args:
        trace: A recorded pass.
        row: Which text of the batch, from 0.
        sites: Names such as ``"L3.attention"`` or ``"output"``, from top to bottom.
        title: What the figure shows.
        footer: What it is from: dtype, checkpoint.
        tokens: Positions in the row, such as ``range(20, 50)``; all real tokens by default. At most 64.

    Raises:
        ConfigError: An unknown site or row, no sites, no tokens, too many of them, or weights outside of
            0 to 1.
        NonFiniteError: A token whose weights are NaN.

    Example:
        >>> import torch
        >>> from attention_residuals.models import Decoder, presets
        >>> from attention_residuals.trace import record
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> figure = token_map(trace, row=0, sites=["L1.mlp"], title="Routing by token", footer="float32")
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['5', '6', '7']
    """
    panels = _panels(trace, sites)
    columns = _columns(trace, row, tokens)
    labels = [_token_label(trace, row, column) for column in columns]
    heights = [len(site.source_names) for site in panels]
    level = max(len(label) for label in labels) <= 3
    with style.applied():
        figure = style.new_figure(
            title,
            footer,
            width=max(_MIN_WIDTH, 1.2 + 0.38 * len(columns)),
            body=0.27 * sum(heights) + 0.35 * len(panels) + 0.4 + _room(labels),
            key=_KEY,
        )
        grid = figure.subplots(
            len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
        )
        for axes, site in zip(grid.flat, panels, strict=True):
            weights = site.token_weights[:, row, columns]
            _check_weights(site.site, weights.T)
            draw_cells(axes, weights, scale=SHARES, written=len(columns) <= 40)
            axes.set_yticks(range(len(weights)), labels=[_source_label(name) for name in site.source_names])
            axes.set_title(_site_label(site), loc="left", fontweight="bold")
        axes.set_xticks(range(len(columns)), labels=labels, rotation=0 if level else 90)
        axes.set_xlabel(f"tokens {columns[0]} to {columns[-1]} of text {row}")
        add_scale(figure, SHARES)
    return figure


def _panels(trace: Trace, sites: Sequence[str]) -> list[SiteTrace]:
    if not sites:
        raise ConfigError(
            got="no sites", expected="one or more", do='pass sites=["output"], or others by name'
        )
    known = [trace[name].site for name in sites]
    return [site for name in known for site in trace.sites if site.site == name]


def _columns(trace: Trace, row: int, tokens: range | None) -> list[int]:
    batch, length = trace.tokens.shape
    if not 0 <= row < batch:
        raise ConfigError(got=f"row={row}", expected=f"0 to {batch - 1}", do="name a text of the trace")
    real = range(length) if trace.mask is None else trace.mask[row].nonzero().flatten().tolist()
    columns = [token for token in real if tokens is None or token in tokens]
    if not 1 <= len(columns) <= _MAX_TOKENS:
        raise ConfigError(
            got=f"{len(columns)} tokens",
            expected=f"1 to {_MAX_TOKENS}, which can be read",
            do=f"pass tokens=range(first, last + 1) within the {len(real)} real tokens of row {row}",
        )
    return columns


def _check_weights(name: str, weights: Float[Tensor, "R S"]) -> None:
    """Checks weights whose rows are reads; NaN is for sources that a read does not have."""
    if weights.isnan().all(1).any():
        raise NonFiniteError(
            got=f"NaN as the weights of a whole read in {name!r}",
            expected="weights",
            do="look at the model: its logits are probably not finite",
        )
    lowest, highest = weights.nan_to_num(0).min().item(), weights.nan_to_num(0).max().item()
    # Weights that were rounded to bfloat16 may be a little above 1.
    if not (lowest >= 0 and highest <= 1.01):
        raise ConfigError(
            got=f"weights from {lowest:.3g} to {highest:.3g} in {name!r}",
            expected="0 to 1, the scale of the colours",
            do="draw softmax weights: other rules need another scale",
        )


def _room(labels: Iterable[str]) -> float:
    """Estimates in inches how long the longest of some labels is."""
    return 0.08 * max(len(label) for label in labels)


def _draw_routing(axes: Axes, name: str, routing: Routing) -> None:
    rows, columns = routing.weights.shape
    draw_cells(axes, routing.weights, scale=SHARES, written=max(rows, columns) <= MAX_WRITTEN)
    axes.patch.set(hatch="////", edgecolor=style.EMPTY)
    for row, column in routing.is_open.nonzero().tolist():
        axes.add_patch(
            Rectangle((column - 0.45, row - 0.45), 0.9, 0.9, fill=False, edgecolor=style.OPEN, linewidth=1.4)
        )
    axes.set_title(style.plain(name), fontweight="bold", loc="left")
    axes.set_xticks(range(columns), labels=[style.plain(source) for source in routing.sources])
    axes.set_yticks(range(rows), labels=[style.plain(site) for site in routing.sites])
    axes.set_xlabel("source")


def _add_meanings(figure: Figure, routings: list[Routing]) -> None:
    is_open = Patch(fill=False, edgecolor=style.OPEN, linewidth=1.4, label="block still open when read")
    is_empty = Patch(facecolor="white", edgecolor=style.EMPTY, hatch="////", label="not a source here")
    entries = [is_open] if any(routing.is_open.any() for routing in routings) else []
    entries += [is_empty] if any(routing.weights.isnan().any() for routing in routings) else []
    if entries:
        style.add_key(figure, entries, ncols=len(entries), indent=2.7)


def _token_label(trace: Trace, row: int, column: int) -> str:
    texts = trace.token_texts
    return style.visible(texts[row][column]) if texts else str(trace.tokens[row, column].item())


def _source_label(name: str) -> str:
    identity, _, is_open = name.partition(".open@")
    return style.plain(f"{identity} (open)" if is_open else identity)


def _site_label(site: SiteTrace) -> str:
    return style.plain(site.site if site.part == "in" else f"{site.site} ({site.part})")

"""Maps of signed effects in which the cells that passed a test are marked."""

import math
from collections.abc import Mapping

from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.plots import style
from attention_residuals.plots.cells import MAX_WRITTEN, Scale, add_scale, draw_cells
from attention_residuals.stats import Routing

__all__ = ["marked_map"]


def marked_map(
    panels: Mapping[str, Routing],
    marked: Mapping[str, Bool[Tensor, "R C"]],
    *,
    unit: str,
    meaning: str,
    title: str,
    footer: str,
) -> Figure:
    """Draws signed effects of sites (rows) and sources (columns), panels side by side on one scale even around 0.

    Args:
        panels: By the panel's title, effects of the same sites; a cell that does not exist is NaN.
        marked: For each panel, which cells are outlined.
        unit: Of the effects.
        meaning: What an outline means.
        title: What the figure shows.
        footer: What it is from.

    Raises:
        ConfigError: No panel, or panels of other sites or sources.
        ShapeError: Marks of another shape than the effects.
        NonFiniteError: No effect other than 0, or an infinite one.

    Example:
        >>> import torch
        >>> cells = torch.tensor([[0.3, -0.7]])
        >>> one = Routing(("L0.mlp",), ("embedding", "B1"), cells, torch.zeros(1, 2, dtype=torch.bool))
        >>> figure = marked_map(
        ...     {"seed 0": one}, {"seed 0": cells.abs() > 0.5}, unit="nats", meaning="p <= 0.05", title="M", footer=""
        ... )
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['L0.mlp']
    """
    _check(panels, marked)
    first = next(iter(panels.values()))
    largest = max(panel.weights.abs().nan_to_num(nan=0.0).max().item() for panel in panels.values())
    scale = Scale(-largest, largest, style.SIGNED)
    rows, columns = first.weights.shape
    written = max(rows, columns) <= MAX_WRITTEN
    cell = 0.42 if written else 0.2
    below = 0.8 + 0.08 * max(len(name) for name in first.sources)
    room = 0.5 + 0.08 * max(len(name) for name in first.sites)
    with style.applied():
        figure = style.new_figure(
            title,
            footer,
            width=max(7.0, len(panels) * (cell * columns + 0.35) + room),
            body=cell * rows + below,
            key=0.5,
        )
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for number, (axes, (name, panel)) in enumerate(zip(grid, panels.items(), strict=True)):
            draw_cells(axes, panel.weights, scale=scale, written=written)
            axes.set_title(style.plain(name), loc="left")
            axes.set_xticks(range(columns), labels=[style.plain(one) for one in panel.sources], rotation=90)
            sites = [style.plain(one) for one in panel.sites] if number == 0 else [""] * rows
            axes.set_yticks(range(rows), labels=sites)
            _outline(axes, marked[name])
        add_scale(figure, scale, label=unit)
        outline = Rectangle((0, 0), 1, 1, fill=False, edgecolor="black", linewidth=1.6)
        outline.set_label(style.plain(meaning))
        style.add_key(figure, [outline], ncols=1, indent=3.2)
    return figure


def _outline(axes: Axes, marks: Bool[Tensor, "R C"]) -> None:
    for row, column in marks.nonzero().tolist():
        axes.add_patch(
            Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.6)
        )


def _check(panels: Mapping[str, Routing], marked: Mapping[str, Tensor]) -> None:
    axes = {(panel.sites, panel.sources) for panel in panels.values()}
    if len(axes) != 1:
        raise ConfigError(
            got=f"panels of {len(axes)} different sets of sites and sources" if axes else "no panels",
            expected="one panel or more, of the same sites and sources",
            do="draw models of another shape in a figure of their own",
        )
    for name, panel in panels.items():
        if name not in marked or marked[name].shape != panel.weights.shape:
            raise ShapeError(
                got=f"marks of shape {list(marked[name].shape) if name in marked else None} for {name!r}",
                expected=f"one for each effect, {list(panel.weights.shape)}",
                do="pass all False where nothing is marked",
            )
    largest = [
        panel.weights.abs().nan_to_num(nan=0.0, posinf=math.inf).max().item() for panel in panels.values()
    ]
    if not 0 < max(largest) < math.inf:
        raise NonFiniteError(
            got=f"effects of which the largest is {max(largest)}",
            expected="finite effects, one of them other than 0",
            do="look at what was measured: effects that are all 0 have no map",
        )

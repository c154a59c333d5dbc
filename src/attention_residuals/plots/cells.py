"""Cells of a map and the scale of their colours."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from attention_residuals.plots import style

__all__ = ["MAX_WRITTEN", "SHARES", "Scale", "add_scale", "draw_cells"]

MAX_WRITTEN = 20
"""A map with at most so many rows and columns has its weights written in."""


class Scale(NamedTuple):
    """From which weight to which the colours of a map go."""

    low: float
    high: float
    colours: Colormap


SHARES = Scale(0.0, 1.0, style.WEIGHTS)
"""Of softmax weights."""


def draw_cells(axes: Axes, weights: Tensor, *, scale: Scale, written: bool) -> None:
    """Draws a cell for each weight, with thin white lines between; NaN leaves its cell out."""
    values = np.ma.masked_invalid(weights.float().numpy())
    norm = Normalize(scale.low, scale.high)
    axes.imshow(values, cmap=scale.colours, norm=norm, aspect="auto", interpolation="nearest")
    rows, columns = values.shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(visible=True, axis="both", which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    if not written:
        return
    for row, column in zip(*np.nonzero(~np.ma.getmaskarray(values)), strict=True):
        weight = values[row, column]
        colour = (
            "white"
            if _is_dark(scale, float(norm(weight)))
            else "black"
            if abs(weight) >= 0.005
            else style.FAINT
        )
        axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=7.5, color=colour)


def add_scale(figure: Figure, scale: Scale, *, label: str = "weight", left: float = 0.75) -> None:
    """Draws a scale in the key, the one of all panels at its left; ``left`` is in inches."""
    width, height = figure.get_size_inches()
    bar = figure.add_axes((left / width, style.key_top(figure) - 0.23 / height, 1.7 / width, 0.13 / height))
    extent = (scale.low, scale.high, 0, 1)
    bar.imshow(np.linspace(0, 1, 256)[None], cmap=scale.colours, aspect="auto", extent=extent)
    middle = (scale.low + scale.high) / 2
    bar.set_xticks(
        [scale.low, middle, scale.high], labels=[f"{tick:.2g}" for tick in (scale.low, middle, scale.high)]
    )
    bar.set_yticks([0.5], labels=[label])
    bar.tick_params(axis="y", length=0)
    bar.spines[:].set_visible(False)


def _is_dark(scale: Scale, place: float) -> bool:
    red, green, blue, _ = scale.colours(place)
    return bool(0.299 * red + 0.587 * green + 0.114 * blue < 0.45)

"""Curves over what a study has varied."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import style

__all__ = ["curve_plot"]


def curve_plot(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    footer: str,
    logarithmic: bool = False,
) -> Figure:
    """Draws a curve for each name.

    Args:
        curves: By name, (x, y) points in the order of x.
        x_label: What x is, with its unit.
        y_label: What y is, with its unit.
        title: What the figure shows.
        footer: What it is from.
        logarithmic: Both axes, so that a power law is a straight line.

    Raises:
        ConfigError: No curve, an empty one, or a number of 0 or less on a logarithmic axis.
        NonFiniteError: A number that is NaN or infinite.

    Example:
        >>> figure = curve_plot(
        ...     {"block": [(1.0, 0.9), (2.0, 0.7)]}, x_label="hops", y_label="share", title="Answers", footer="1 seed"
        ... )
        >>> figure.axes[0].get_xlabel()
        'hops'
    """
    if not curves or not all(curves.values()):
        raise ConfigError(
            got=f"curves of {[name for name, points in curves.items() if points]}",
            expected="one curve or more, each with points",
            do="leave out what has none",
        )
    numbers = [number for points in curves.values() for point in points for number in point]
    _check(numbers)
    if logarithmic and min(numbers) <= 0:
        raise ConfigError(
            got=f"{min(numbers)} on a logarithmic axis",
            expected="numbers above 0",
            do="pass logarithmic=False",
        )
    with style.applied():
        figure = style.new_figure(title, footer, width=7.5, body=3.8, key=0.15 + 0.2 * len(curves))
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(curves.items()):
            line = np.array(points, dtype=float)
            axes.plot(
                line[:, 0],
                line[:, 1],
                color=style.COLOURS[number % len(style.COLOURS)],
                linestyle=style.DASHES[number % len(style.DASHES)],
                linewidth=1.8,
                marker=style.MARKERS[number % len(style.MARKERS)],
                markersize=5,
                label=style.plain(name),
            )
        style.add_key(figure, list(axes.lines), ncols=1, indent=0.4)
        axes.set_xlabel(style.plain(x_label))
        axes.set_ylabel(style.plain(y_label))
        axes.grid(visible=True, axis="y")
        if logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(ticker.StrMethodFormatter("{x:g}"))
    return figure


def _check(numbers: Sequence[float]) -> None:
    if bad := [number for number in numbers if not math.isfinite(number)]:
        raise NonFiniteError(
            got=f"{len(bad)} of {len(numbers)} numbers are not finite, the first is {bad[0]}",
            expected="finite numbers",
            do="leave them out, and say so in the footer",
        )

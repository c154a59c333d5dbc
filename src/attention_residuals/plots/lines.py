"""Lines: losses over a run, values layer by layer, and curves over what a study has varied."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import style

__all__ = ["curve_plot", "layer_profile", "loss_curves"]


def loss_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    footer: str,
) -> Figure:
    """Draws how a loss falls, a line for each model: the whole run, and its last half on a scale of its own.

    Args:
        curves: By the name of the model, (x, y) points in the order of x, such as (tokens, bits per byte).
        x_label: What x is, with its unit.
        y_label: What y is, with its unit.
        title: What the figure shows.
        footer: What it is from.

    Raises:
        ConfigError: No curve, or a curve without points.
        NonFiniteError: A point that is NaN or infinite.

    Example:
        >>> curves = {"standard": [(0.0, 8.0), (1e6, 3.1)], "Block AttnRes": [(0.0, 8.0), (1e6, 3.0)]}
        >>> figure = loss_curves(
        ...     curves, x_label="tokens", y_label="bits per byte", title="Held-out loss", footer="one seed"
        ... )
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['standard (last 3.100)', 'Block AttnRes (last 3.000)']
    """
    _check_points(curves)
    lines = _arrays(curves)
    every_x = np.concatenate(list(lines.values()))[:, 0]
    middle = (every_x.min() + every_x.max()) / 2
    late = {name: line[line[:, 0] >= middle] for name, line in lines.items()}
    with style.applied():
        figure = style.new_figure(title, footer, width=10.5, body=3.8, key=_key(lines))
        for axes, part, shown in zip(
            figure.subplots(1, 2), ("the whole run", "its last half"), (lines, late), strict=True
        ):
            _draw(axes, shown)
            axes.set_title(part, loc="left")
            axes.set_xlabel(style.plain(x_label))
            axes.set_ylabel(style.plain(y_label))
            if every_x.max() >= 10_000:
                axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        _add_names(figure, [f"{name} (last {line[-1, 1]:.3f})" for name, line in lines.items()])
    return figure


def layer_profile(
    profiles: Mapping[str, Sequence[float]],
    *,
    y_label: str,
    title: str,
    footer: str,
    logarithmic: bool = False,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Draws a value layer by layer, a line for each model (paper, Fig. 5b and 5c).

    Args:
        profiles: By the name of the model, its value at layer 0, 1, 2, ...
        y_label: What the value is, with its unit.
        title: What the figure shows.
        footer: What it is from.
        logarithmic: Equal ratios look equal; else the axis starts at 0, or below where values do.
        intervals: By the same names, the lower and the upper end at each layer; drawn as bands.

    Raises:
        ConfigError: No profile, an empty one, or a value of 0 or less on a logarithmic axis.
        NonFiniteError: A value that is NaN or infinite.

    Example:
        >>> figure = layer_profile(
        ...     {"standard": [1.0, 2.0, 3.5]}, y_label="RMS", title="Output magnitude", footer="90 tokens"
        ... )
        >>> figure.axes[0].lines[0].get_xdata().tolist()
        [0.0, 1.0, 2.0]
    """
    _check(profiles)
    bands = {name: np.array(ends, dtype=float) for name, ends in (intervals or {}).items()}
    if bands:
        _check({name: list(band.flat) for name, band in bands.items()})
    every_value = [value for values in profiles.values() for value in values]
    every_value += [end for band in bands.values() for end in band.flat]
    if logarithmic:
        _check_logarithms(every_value)
    with style.applied():
        figure = style.new_figure(title, footer, width=7.5, body=3.8, key=_key(profiles))
        axes = figure.add_subplot()
        _draw(axes, {name: np.array(list(enumerate(values)), float) for name, values in profiles.items()})
        for number, name in enumerate(profiles):
            if name in bands:
                colour = style.COLOURS[number % len(style.COLOURS)]
                axes.fill_between(
                    range(len(bands[name])), *bands[name].T, color=colour, alpha=0.15, linewidth=0
                )
        _add_names(figure, list(profiles))
        axes.set_xlabel("layer")
        axes.set_ylabel(style.plain(y_label))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        elif min(every_value) >= 0:
            axes.set_ylim(bottom=0)
    return figure


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
    _check_points(curves)
    if logarithmic:
        _check_logarithms([number for points in curves.values() for point in points for number in point])
    with style.applied():
        figure = style.new_figure(title, footer, width=7.5, body=3.8, key=_key(curves))
        axes = figure.add_subplot()
        _draw(axes, _arrays(curves))
        _add_names(figure, list(curves))
        axes.set_xlabel(style.plain(x_label))
        axes.set_ylabel(style.plain(y_label))
        if logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(ticker.StrMethodFormatter("{x:g}"))
    return figure


def _draw(axes: Axes, lines: Mapping[str, npt.NDArray[np.float64]]) -> None:
    """Draws lines that differ in colour, dashes and markers."""
    for number, line in enumerate(lines.values()):
        axes.plot(
            line[:, 0],
            line[:, 1],
            color=style.COLOURS[number % len(style.COLOURS)],
            linestyle=style.DASHES[number % len(style.DASHES)],
            linewidth=1.8,
            marker=style.MARKERS[number % len(style.MARKERS)],
            markersize=5,
            markevery=max(1, len(line) // 20),
        )
    axes.grid(visible=True, axis="y")


def _key(lines: Mapping[str, object]) -> float:
    return 0.15 + 0.2 * len(lines)


def _add_names(figure: Figure, names: Sequence[str]) -> None:
    handles = figure.axes[0].lines
    for line, name in zip(handles, names, strict=True):
        line.set_label(style.plain(name))
    style.add_key(figure, list(handles), ncols=1, indent=0.4)


def _arrays(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, npt.NDArray[np.float64]]:
    return {name: np.array(points, dtype=float) for name, points in curves.items()}


def _check_points(curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    _check({name: [number for point in points for number in point] for name, points in curves.items()})


def _check_logarithms(numbers: Sequence[float]) -> None:
    if min(numbers) <= 0:
        raise ConfigError(
            got=f"{min(numbers)} on a logarithmic axis",
            expected="values above 0",
            do="pass logarithmic=False",
        )


def _check(lines: Mapping[str, Sequence[float]]) -> None:
    if not lines or not all(lines.values()):
        empty = [name for name, values in lines.items() if not values]
        raise ConfigError(
            got=f"no values for {empty}" if empty else "no lines",
            expected="one line or more, each with values",
            do="pass {name: values}, and leave out what has none",
        )
    for name, values in lines.items():
        if bad := [value for value in values if not math.isfinite(value)]:
            raise NonFiniteError(
                got=f"{len(bad)} of {len(values)} numbers of {name!r} are not finite, the first is {bad[0]}",
                expected="finite numbers, since a gap in a line is easily overlooked",
                do="leave those points out, and say so in the footer",
            )

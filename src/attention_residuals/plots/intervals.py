"""Estimates with their intervals, row by row."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import style
from attention_residuals.stats import Interval

__all__ = ["interval_plot"]

_STEP, _GAP = 0.17, 0.16
"""Inches from mark to mark in a row, and between rows."""


def interval_plot(
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]],
    *,
    x_label: str,
    title: str,
    footer: str,
    line: float = 0.0,
) -> Figure:
    """Draws estimates with their intervals: a row for each name, and in it a mark for each series.

    All panels have one scale. An estimate whose interval is NaN is drawn as an open mark alone.

    Args:
        panels: By the panel's title, rows by name, each with an interval by series, such as
            ``{"Block": {"effect": {"seed 0": Interval(0.2, 0.1, 0.3)}}}``. Two panels or more have the same
            rows; a row or a series may be left out where there is nothing to show.
        x_label: What is estimated, with its unit.
        title: What the figure shows.
        footer: What it is from.
        line: Where a thin line stands for comparison.

    Raises:
        ConfigError: No panel, or a panel without an estimate.
        NonFiniteError: An estimate that is NaN or infinite, or an infinite interval.

    Example:
        >>> rows = {"seed 0": {"": Interval(0.2, 0.1, 0.3)}, "seed 1": {"": Interval(-0.1, -0.2, 0.1)}}
        >>> figure = interval_plot({"Block": rows}, x_label="nats", title="Effect", footer="n = 40 items")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['seed 0', 'seed 1']
    """
    _check(panels)
    rows = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    series = list(dict.fromkeys(name for panel in panels.values() for row in panel.values() for name in row))
    beside = min(len(panels), 2 if len(panels) == 4 else 3)
    below = math.ceil(len(panels) / beside)
    room = 0.3 + 0.075 * max(len(name) for name in rows)
    height = len(rows) * (_STEP * len(series) + _GAP)
    label = textwrap.wrap(style.plain(x_label), 34)  # as many letters as a panel is wide
    with style.applied():
        figure = style.new_figure(
            title,
            footer,
            width=max(6.5, room + 2.9 * beside),
            body=below * (height + 0.45) + 0.2 + 0.17 * len(label),
            key=0.15 + 0.2 * len(series) if len(series) > 1 else 0.1,
        )
        grid = figure.subplots(below, beside, squeeze=False, sharex=True, sharey=True)
        for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
            _draw(axes, panel, rows, series, line)
            axes.set_title(style.plain(name), loc="left")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("\n".join(label))
        if len(series) > 1:
            style.add_key(figure, _marks(figure.axes[0], series), ncols=1, indent=0.4)
    return figure


def _draw(
    axes: Axes,
    panel: Mapping[str, Mapping[str, Interval]],
    rows: list[str],
    series: list[str],
    line: float,
) -> None:
    height = _STEP * len(series) + _GAP
    axes.axvline(line, color=style.FAINT, linewidth=0.8)
    for place, row in enumerate(rows):
        for number, name in enumerate(series):
            if name not in panel.get(row, {}):
                continue
            found = panel[row][name]
            level = place + _STEP * (number - (len(series) - 1) / 2) / height
            is_known = math.isfinite(found.low) and math.isfinite(found.high)
            colour = style.COLOURS[number % len(style.COLOURS)]
            if is_known:
                axes.plot([found.low, found.high], [level, level], color=colour, linewidth=1.6)
            axes.plot(
                [found.estimate],
                [level],
                color=colour,
                marker=style.MARKERS[number % len(style.MARKERS)],
                markersize=5.5,
                markerfacecolor=colour if is_known else "white",
                linestyle="none",
            )
    axes.set_yticks(range(len(rows)), labels=[style.plain(name) for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")


def _marks(axes: Axes, series: list[str]) -> list[Any]:
    """Makes what stands for each series in the key."""
    return [
        axes.plot(
            [],
            [],
            color=style.COLOURS[number % len(style.COLOURS)],
            marker=style.MARKERS[number % len(style.MARKERS)],
            linewidth=1.6,
            label=style.plain(name),
        )[0]
        for number, name in enumerate(series)
    ]


def _check(panels: Mapping[str, Mapping[str, Mapping[str, Interval]]]) -> None:
    empty = [name for name, panel in panels.items() if not any(panel.values())]
    if not panels or empty:
        raise ConfigError(
            got=f"no estimate in {empty}" if empty else "no panels",
            expected="one panel or more, each with an estimate",
            do="leave out what was not measured",
        )
    for panel in panels.values():
        for name, row in panel.items():
            for found in row.values():
                if not math.isfinite(found.estimate) or math.isinf(found.low) or math.isinf(found.high):
                    raise NonFiniteError(
                        got=f"{found} in row {name!r}",
                        expected="a finite estimate, with a finite interval or one of NaN",
                        do="leave it out, and say so in the footer",
                    )

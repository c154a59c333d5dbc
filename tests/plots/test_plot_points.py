"""Figures of studies: what is drawn is what was given."""

import math

import pytest

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import curve_plot, interval_plot, png_bytes
from attention_residuals.stats import Interval

INTERVALS = {"block": Interval(-0.02, -0.03, -0.01), "mhc $x_1$": Interval(0.01, -0.01, 0.03)}
WORDS = {"x_label": "nats", "title": "Differences", "footer": "5 seeds"}


def test_every_interval_stands_at_its_name_and_the_papers_number_beside_it():
    figure = interval_plot(INTERVALS, beside={"block": -0.025}, beside_name="paper", **WORDS)
    axes = figure.axes[0]
    lines = [line.get_xydata().tolist() for line in axes.lines[1:]]
    assert lines == [
        [[-0.03, 0.0], [-0.01, 0.0]],
        [[-0.01, 1.0], [0.03, 1.0]],
        [[-0.02, 0.0], [0.01, 1.0]],
        [[-0.025, 0.0]],
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()][1] == "paper"
    assert png_bytes(figure)


def test_without_numbers_beside_the_key_does_not_name_them():
    figure = interval_plot(INTERVALS, beside={}, beside_name="paper", **WORDS)
    assert len(figure.legends[0].get_texts()) == 1


def test_curves_hold_their_points():
    curves = {"standard": [(1.0, 0.5), (2.0, 0.25)], "block": [(1.0, 0.75)]}
    figure = curve_plot(curves, y_label="share", **WORDS)
    assert [line.get_xydata().tolist() for line in figure.axes[0].lines] == [
        [[1.0, 0.5], [2.0, 0.25]],
        [[1.0, 0.75]],
    ]
    assert figure.axes[0].get_xscale() == "linear"
    logs = curve_plot(curves, y_label="share", logarithmic=True, **WORDS).axes[0]
    assert (logs.get_xscale(), logs.get_yscale()) == ("log", "log")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="one interval or more"):
        interval_plot({}, beside={}, beside_name="paper", **WORDS)
    with pytest.raises(ConfigError, match="one interval or more"):
        interval_plot(INTERVALS, beside={"full": 1.0}, beside_name="paper", **WORDS)
    with pytest.raises(NonFiniteError):
        interval_plot({"a": Interval(0.0, -math.inf, 0.0)}, beside={}, beside_name="paper", **WORDS)
    for curves in ({}, {"a": []}):
        with pytest.raises(ConfigError, match="one curve or more"):
            curve_plot(curves, y_label="share", **WORDS)
    with pytest.raises(ConfigError, match="logarithmic"):
        curve_plot({"a": [(0.0, 1.0)]}, y_label="share", logarithmic=True, **WORDS)
    with pytest.raises(NonFiniteError):
        curve_plot({"a": [(0.0, math.nan)]}, y_label="share", **WORDS)

"""Curves of studies: what is drawn is what was given."""

import math

import pytest

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import curve_plot, png_bytes

WORDS = {"x_label": "nats", "title": "Differences", "footer": "5 seeds"}


def test_curves_hold_their_points():
    curves = {"standard": [(1.0, 0.5), (2.0, 0.25)], "block": [(1.0, 0.75)]}
    figure = curve_plot(curves, y_label="share", **WORDS)
    assert [line.get_xydata().tolist() for line in figure.axes[0].lines] == [
        [[1.0, 0.5], [2.0, 0.25]],
        [[1.0, 0.75]],
    ]
    assert figure.axes[0].get_xscale() == "linear"
    assert png_bytes(figure)
    logs = curve_plot(curves, y_label="share", logarithmic=True, **WORDS).axes[0]
    assert (logs.get_xscale(), logs.get_yscale()) == ("log", "log")


def test_what_cannot_be_drawn_is_refused():
    for curves in ({}, {"a": []}):
        with pytest.raises(ConfigError, match="one line or more"):
            curve_plot(curves, y_label="share", **WORDS)
    with pytest.raises(ConfigError, match="logarithmic"):
        curve_plot({"a": [(0.0, 1.0)]}, y_label="share", logarithmic=True, **WORDS)
    with pytest.raises(NonFiniteError):
        curve_plot({"a": [(0.0, math.nan)]}, y_label="share", **WORDS)

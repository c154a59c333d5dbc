"""Estimates with intervals, and maps whose tested cells are outlined."""

import math

import pytest
import torch
from matplotlib.patches import Rectangle

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.plots import interval_plot, marked_map, png_bytes
from attention_residuals.stats import Interval, Routing

ROWS = {
    "near": {"seed 0": Interval(0.2, 0.1, 0.3), "seed 1": Interval(-0.1, -0.4, 0.1)},
    "far": {"seed 1": Interval(0.5, math.nan, math.nan)},
}
CELLS = torch.tensor([[0.3, -0.7], [math.nan, 0.1]])
MAP = Routing(("L0.mlp", "output"), ("embedding", "B1"), CELLS, torch.zeros(2, 2, dtype=torch.bool))


def points(axes):
    return sorted(line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "None")


def test_every_estimate_is_a_mark_and_every_known_interval_a_line():
    figure = interval_plot(
        {"A": ROWS, "B": {"near": ROWS["near"]}}, x_label="nats", title="Effect", footer="n = 3", line=0.05
    )
    first, second = figure.axes
    assert points(first) == [-0.1, 0.2, 0.5]
    spans = {tuple(line.get_xdata()) for line in first.lines if line.get_linestyle() == "-"}
    assert {(0.1, 0.3), (-0.4, 0.1)} <= spans
    assert not any(0.5 in span for span in spans)
    open_marks = [line for line in first.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in open_marks] == [0.5]
    assert points(second) == [-0.1, 0.2]
    assert first.get_xlim() == second.get_xlim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["seed 0", "seed 1"]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_four_panels_are_two_by_two_and_one_series_needs_no_key():
    one = {"row": {"": Interval(0.2, 0.1, 0.3)}}
    figure = interval_plot(dict.fromkeys("ABCD", one), x_label="share", title="", footer="")
    assert [axes.get_title(loc="left") for axes in figure.axes] == list("ABCD")
    assert figure.axes[0].get_subplotspec().get_gridspec().ncols == 2
    assert not figure.legends


@pytest.mark.parametrize("panels", [{}, {"A": {}}, {"A": ROWS, "B": {"near": {}}}])
def test_what_was_not_measured_is_not_drawn(panels):
    with pytest.raises(ConfigError, match="leave out what was not measured"):
        interval_plot(panels, x_label="", title="", footer="")


@pytest.mark.parametrize("bad", [Interval(math.nan, 0.1, 0.3), Interval(0.2, -math.inf, 0.3)])
def test_an_estimate_that_is_no_number_is_refused(bad):
    with pytest.raises(NonFiniteError, match="in row 'near'"):
        interval_plot({"A": {"near": {"": bad}}}, x_label="", title="", footer="")


def outlined(axes):
    return {
        (round(patch.get_y() + 0.5), round(patch.get_x() + 0.5))
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    }


def test_marked_cells_are_outlined_and_the_scale_is_even_around_zero():
    marks = torch.tensor([[False, True], [False, False]])
    figure = marked_map(
        {"seed 0": MAP, "mean": MAP._replace(weights=CELLS / 2)},
        {"seed 0": marks, "mean": ~marks & ~CELLS.isnan()},
        unit="nats",
        meaning="passes",
        title="Effects",
        footer="n = 3",
    )
    first, mean, scale = figure.axes
    assert outlined(first) == {(0, 1)}
    assert outlined(mean) == {(0, 0), (1, 1)}
    assert [text.get_text() for text in first.texts] == ["0.30", "-0.70", "0.10"]
    assert first.images[0].get_clim() == mean.images[0].get_clim() == pytest.approx((-0.7, 0.7))
    assert [label.get_text() for label in scale.get_xticklabels()] == ["-0.7", "0", "0.7"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["passes"]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_maps_that_cannot_be_drawn_are_refused():
    marks = {"A": torch.zeros(2, 2, dtype=torch.bool)}
    words = {"unit": "nats", "meaning": "", "title": "", "footer": ""}
    with pytest.raises(ConfigError, match="no panels"):
        marked_map({}, {}, **words)
    with pytest.raises(ConfigError, match="2 different sets"):
        marked_map({"A": MAP, "B": MAP._replace(sources=("embedding", "B2"))}, marks, **words)
    with pytest.raises(ShapeError, match="marks of shape None for 'B'"):
        marked_map({"A": MAP, "B": MAP}, marks, **words)
    for bad in (0.0, math.inf):
        with pytest.raises(NonFiniteError, match="effects of which the largest is"):
            marked_map({"A": MAP._replace(weights=torch.full((2, 2), bad))}, marks, **words)

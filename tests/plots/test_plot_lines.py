import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import layer_profile, loss_curves

numbers = st.floats(-1e6, 1e6)


def drawn(curves, **changes):
    labels = {"x_label": "tokens", "y_label": "bits per byte", "title": "Loss", "footer": "one seed"}
    return loss_curves(curves, **(labels | changes))


def profile(profiles, **changes):
    labels = {"y_label": "RMS", "title": "Magnitude", "footer": "52 tokens, float32"}
    return layer_profile(profiles, **(labels | changes))


def points(line):
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))


def texts(figure):
    return [text.get_text() for text in figure.texts]


@given(
    st.dictionaries(
        st.text(min_size=1), st.lists(st.tuples(numbers, numbers), min_size=1), min_size=1, max_size=4
    )
)
def test_a_loss_curve_holds_every_point_and_its_second_panel_those_of_the_last_half(curves):
    whole, late = drawn(curves).axes
    every_x = [x for line in curves.values() for x, _ in line]
    middle = (min(every_x) + max(every_x)) / 2
    assert [points(line) for line in whole.lines] == list(curves.values())
    assert [points(line) for line in late.lines] == [
        [p for p in line if p[0] >= middle] for line in curves.values()
    ]


def test_the_last_half_has_a_scale_on_which_small_differences_show():
    curves = {
        name: [(x * 1.0, 8.0 if x < 50 else end) for x in range(100)]
        for name, end in (("a", 2.0), ("b", 2.1))
    }
    low, high = drawn(curves).axes[1].get_ylim()
    assert 2.0 > low > 1.9
    assert 2.1 < high < 2.2


def test_every_line_is_named_in_the_key_with_its_last_value():
    figure = drawn({"standard": [(0.0, 8.0), (1.0, 2.10449)], "50 $ or $ more": [(0.0, 8.0), (1.0, 3.0)]})
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == [
        "standard (last 2.104)",
        r"50 \$ or \$ more (last 3.000)",
    ]


def test_any_two_lines_differ_in_more_than_colour():
    lines = drawn({str(number): [(0.0, 1.0), (1.0, number * 1.0)] for number in range(12)}).axes[0].lines
    looks = [(line.get_linestyle(), line.get_marker()) for line in lines]
    assert all(one != other for one, other in itertools.combinations(looks, 2))
    assert len({line.get_color() for line in lines[:7]}) == 7


def test_a_figure_says_what_it_shows_and_what_it_is_from():
    figure = drawn({"a": [(0.0, 1.0)]}, title="Costs $5", footer="3 tokens, float32")
    assert texts(figure) == [r"Costs \$5", "3 tokens, float32"]
    for axes in figure.axes:
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens", "bits per byte")


def test_large_counts_of_tokens_are_written_shortly():
    axes = drawn({"a": [(0.0, 1.0), (4e6, 2.0)]}).axes[0]
    assert axes.xaxis.get_major_formatter()(2_000_000) == "2M"
    assert drawn({"a": [(0.0, 1.0), (0.5, 2.0)]}).axes[0].xaxis.get_major_formatter().format_ticks([0.5]) == [
        "0.5"
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_profile_counts_layers_from_0_and_magnitudes_from_0(values):
    axes = profile({"standard": values}).axes[0]
    assert points(axes.lines[0]) == list(enumerate(values))
    assert axes.get_ylim()[0] == 0
    assert axes.get_xlabel() == "layer"


def test_a_profile_with_values_below_0_is_not_cut():
    assert profile({"a": [1.0, -2.0]}).axes[0].get_ylim()[0] < -2


def test_equal_ratios_look_equal_on_a_logarithmic_axis():
    axes = profile({"a": [0.01, 10.0]}, logarithmic=True).axes[0]
    heights = axes.transData.transform([(0, 0.1), (0, 1.0), (0, 10.0)])[:, 1]
    assert np.isclose(heights[1] - heights[0], heights[2] - heights[1])
    assert axes.yaxis.get_major_formatter()(0.05) == "0.05"


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"b": [1.0], "a": []}])
def test_nothing_to_draw_is_refused(lines):
    with pytest.raises(ConfigError, match=r"no lines|'a'"):
        profile(lines)
    with pytest.raises(ConfigError):
        drawn({name: [(value, value) for value in values] for name, values in lines.items()})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gap_in_a_line_is_refused(bad):
    with pytest.raises(NonFiniteError, match="1 of 2 numbers of 'a'"):
        profile({"a": [1.0, bad]})
    with pytest.raises(NonFiniteError, match="'a'"):
        drawn({"b": [(0.0, 0.0)], "a": [(0.0, bad)]})


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_values_that_have_no_logarithm_are_refused(value):
    with pytest.raises(ConfigError, match="logarithmic=False"):
        profile({"a": [1.0, value]}, logarithmic=True)


def test_a_profile_with_intervals_shows_both_ends_and_refuses_a_gap():
    axes = profile({"a": [1.0, 2.0]}, intervals={"a": [(-0.5, 1.5), (1.0, 3.0)]}).axes[0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert {-0.5, 1.5} <= set(corners[corners[:, 0] == 0, 1])
    assert {1.0, 3.0} <= set(corners[corners[:, 0] == 1, 1])
    assert axes.get_ylim()[0] < -0.5  # an axis from 0 would cut it off
    with pytest.raises(NonFiniteError):
        profile({"a": [1.0, 2.0]}, intervals={"a": [(0.5, math.nan), (1.0, 3.0)]})

"""Weights beside effects, and two routings beside their difference."""

import math

import pytest
import torch

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import contrast_map, effect_map, png_bytes
from attention_residuals.stats import Routing

SITES, SOURCES = ("L0.mlp", "L1.mlp", "output"), ("embedding", "B1")


def routing(cells, sites=SITES, sources=SOURCES):
    weights = torch.tensor(cells)
    return Routing(sites, sources, weights, torch.zeros_like(weights, dtype=torch.bool))


WEIGHTS = routing([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
EFFECTS = routing([[0.004, 0.0], [math.nan, 0.002]], sites=("L1.mlp", "output"))


def written(axes):
    return [text.get_text() for text in axes.texts]


def test_effects_stand_beside_the_weights_of_the_same_edges():
    figure = effect_map(WEIGHTS, EFFECTS, title="Edges", footer="n = 3 tokens")
    left, right, weight_scale, effect_scale = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["L1.mlp", "output"]
    assert written(left) == ["0.50", "0.50", "1.00", "0.00"]
    assert written(right) == ["4.00", "0.00", "2.00"]  # millinats; the missing edge is left out
    assert [label.get_text() for label in weight_scale.get_xticklabels()] == ["0", "0.5", "1"]
    assert effect_scale.get_yticklabels()[0].get_text() == "millinats"
    assert effect_scale.get_xticks()[-1] == pytest.approx(4.0)
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_large_effects_are_in_nats():
    large = EFFECTS._replace(weights=EFFECTS.weights * 1000)
    figure = effect_map(WEIGHTS, large, title="Edges", footer="")
    assert written(figure.axes[1]) == ["4.00", "0.00", "2.00"]
    assert figure.axes[3].get_yticklabels()[0].get_text() == "nats"


def test_effects_that_cannot_be_drawn_are_refused():
    with pytest.raises(ConfigError, match=r"effects of L7\.mlp"):
        effect_map(WEIGHTS, EFFECTS._replace(sites=("L7.mlp", "output")), title="", footer="")
    for bad in (0.0, math.inf):
        with pytest.raises(NonFiniteError, match="effects of which the largest is"):
            effect_map(WEIGHTS, EFFECTS._replace(weights=torch.full((2, 2), bad)), title="", footer="")


def test_a_contrast_has_one_scale_for_both_and_an_even_one_for_the_difference():
    other = WEIGHTS._replace(weights=torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]))
    figure = contrast_map(WEIGHTS, other, names=("clean", "edited"), title="Two texts", footer="n = 1 token")
    first, second, difference = figure.axes[:3]
    assert [axes.get_title(loc="left") for axes in (first, second, difference)] == [
        "clean",
        "edited",
        "second less first",
    ]
    assert written(difference) == ["0.25", "-0.25", "0.00", "0.00", "-0.10", "0.10"]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0.0, 1.0)
    assert difference.images[0].get_clim() == pytest.approx((-0.25, 0.25))
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_the_same_twice_has_no_difference():
    figure = contrast_map(WEIGHTS, WEIGHTS, names=("A", "B"), title="", footer="")
    assert set(written(figure.axes[2])) == {"0.00"}
    with pytest.raises(ConfigError, match="or of other sources"):
        contrast_map(WEIGHTS, EFFECTS, names=("A", "B"), title="", footer="")

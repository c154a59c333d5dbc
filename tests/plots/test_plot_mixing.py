import pytest
import torch

from attention_residuals.errors import NonFiniteError
from attention_residuals.plots import mixing_map, png_bytes
from attention_residuals.stats import Routing


def routing(weights):
    count = len(weights)
    names = tuple(f"w{number}" for number in range(count))
    return Routing(names, names, weights, torch.zeros(count, count, dtype=torch.bool))


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def ticks(figure):
    return [label.get_text() for label in figure.axes[1].get_xticklabels()]


def test_shares_are_drawn_from_zero_to_one_and_what_is_not_written_is_left_out():
    figure = mixing_map(routing(torch.tensor([[1.0, torch.nan], [0.25, 0.75]])), title="M", footer="n")
    assert texts(figure) == ["1.00", "0.25", "0.75"]
    assert ticks(figure) == ["0", "0.5", "1"]
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_other_weights_are_drawn_on_a_scale_with_zero_in_the_middle():
    figure = mixing_map(routing(torch.tensor([[1.0, torch.nan], [-0.5, 2.0]])), title="M", footer="n")
    assert texts(figure) == ["1.00", "-0.50", "2.00"]
    assert ticks(figure) == ["-2", "0", "2"]


def test_a_large_map_has_no_numbers_written_in():
    assert texts(mixing_map(routing(torch.ones(21, 21)), title="M", footer="n")) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_a_matrix_without_a_finite_weight_is_refused(value):
    with pytest.raises(NonFiniteError, match="mixing matrix"):
        mixing_map(routing(torch.full((2, 2), value)), title="M", footer="n")

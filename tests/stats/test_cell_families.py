"""Adjusted p of many cells: against other implementations, and by laws."""

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.stats import benjamini_hochberg, benjamini_yekutieli, max_t, sign_flip

CHANCES = arrays(np.float64, st.integers(1, 12), elements=st.floats(0, 1))


@given(CHANCES)
def test_q_is_scipys(p):
    np.testing.assert_allclose(benjamini_hochberg(p), scipy.stats.false_discovery_control(p))
    np.testing.assert_allclose(
        benjamini_yekutieli(p), scipy.stats.false_discovery_control(p, method="by"), atol=1e-12
    )


@given(CHANCES)
def test_q_keeps_the_order_of_p_and_is_never_below_it(p):
    q = benjamini_hochberg(p)
    assert (q >= p).all()
    assert (np.diff(q[np.argsort(p, kind="stable")]) >= 0).all()
    assert (benjamini_yekutieli(p) >= q).all()


def test_q_keeps_the_shape_of_a_map():
    assert benjamini_hochberg(np.full((3, 4), 0.5)).shape == (3, 4)


def by_hand(effects):
    """The largest t of any cell over every way to turn signs, with t from its definition."""

    def t(rows):
        return np.abs(rows.mean(0)) / (rows.std(0, ddof=1) / np.sqrt(len(rows)))

    largest = [
        t(effects * np.array(signs)[:, None]).max()
        for signs in itertools.product((1, -1), repeat=len(effects))
    ]
    return [np.mean(np.array(largest) >= one - 1e-9) for one in t(effects)]


def test_max_t_is_the_largest_t_over_every_flip():
    effects = np.random.default_rng(0).normal(0.4, 1, size=(7, 3))
    np.testing.assert_allclose(max_t(effects), by_hand(effects))


def test_max_t_of_clusters_is_that_of_their_sums():
    effects = np.random.default_rng(1).normal(size=(8, 3, 2))
    labels = np.repeat(np.arange(8), 3)
    np.testing.assert_array_equal(max_t(effects.reshape(24, 2), clusters=labels), max_t(effects.sum(axis=1)))


@given(arrays(np.float64, 7, elements=st.integers(-9, 9).map(float)))
def test_one_cell_is_a_sign_flip(effects):
    assert max_t(effects[:, None])[0] == pytest.approx(sign_flip(effects).p)


@given(
    arrays(np.float64, (6, 3), elements=st.integers(-9, 9).map(float)),
    st.sampled_from([0.5, 8.0, 1e-6]),
)
def test_max_t_does_not_depend_on_units_and_more_cells_never_lower_p(effects, scale):
    p = max_t(effects)
    np.testing.assert_allclose(max_t(effects * [1.0, scale, -scale]), p)
    assert (max_t(effects[:, :2]) <= p[:2] + 1e-12).all()
    assert ((p > 0) & (p <= 1)).all()


def test_a_cell_that_never_changes_has_p_1_and_one_that_always_does_the_smallest():
    effects = np.stack([np.zeros(6), np.ones(6)], axis=1)
    np.testing.assert_array_equal(max_t(effects), [1.0, 2 / 64])


def test_random_flips_count_the_measured_one():
    effects = np.random.default_rng(2).normal(3, 1, size=(30, 2))
    np.testing.assert_allclose(max_t(effects, num_flips=99), 1 / 100)


def test_wrong_shapes_and_chances_are_named():
    with pytest.raises(ShapeError, match=r"\[items, cells\]"):
        max_t([1.0, 2.0])
    with pytest.raises(ShapeError, match="2 items or clusters"):
        max_t([[1.0], [2.0]], clusters=["a", "a"])
    with pytest.raises(NonFiniteError):
        max_t([[1.0], [np.inf]])
    with pytest.raises(ConfigError, match=r"p from 0\.5 to 1\.5"):
        benjamini_hochberg([0.5, 1.5])

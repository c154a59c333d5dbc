"""Sign flips, effect sizes and units: laws, and second routes to the same numbers."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.stats import crossed_effects, effect_size, item_means, sign_flip

EFFECTS = arrays(np.float64, st.integers(1, 8), elements=st.integers(-9, 9).map(float))


def every_flip(effects):
    """Counts by hand how many ways to turn the signs give a sum as far from 0."""
    ways = [
        abs(sum(sign * one for sign, one in zip(signs, effects, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(effects))
    ]
    return sum(way >= abs(sum(effects)) for way in ways) / len(ways)


@given(EFFECTS)
def test_an_exact_sign_flip_counts_every_flip(effects):
    found = sign_flip(effects)
    assert found.is_exact
    assert found.p == every_flip(effects.tolist())
    assert found.effect == pytest.approx(effects.mean())


def test_an_exact_sign_flip_is_scipys_permutation_test():
    effects = np.random.default_rng(0).normal(0.4, 1, size=11)
    theirs = scipy.stats.permutation_test(
        (effects,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    # Theirs pairs an effect with nothing, which turns its sign; two-sided is twice the smaller tail.
    both = scipy.stats.permutation_test(
        (effects, np.zeros(11)), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=np.inf
    )
    assert sign_flip(effects).p == pytest.approx(both.pvalue)
    assert theirs.pvalue == pytest.approx(both.pvalue)


def test_random_flips_agree_with_all_of_them():
    effects = np.random.default_rng(1).normal(0.4, 1, size=14)
    few = sign_flip(effects, num_flips=10_000)
    every = sign_flip(effects, num_flips=2**14)
    assert (few.is_exact, every.is_exact) == (False, True)
    assert few.p == pytest.approx(every.p, abs=4 * math.sqrt(every.p / 10_000))
    assert few.smallest_p == 1 / 10_001
    assert every.smallest_p == 2 / 2**14


@given(EFFECTS, st.sampled_from([0.1, 3.0, 1e9]), st.permutations(range(8)))
def test_p_does_not_depend_on_unit_sign_or_order(effects, scale, order):
    p = sign_flip(effects).p
    assert sign_flip(effects * scale).p == p
    assert sign_flip(-effects).p == p
    assert sign_flip(effects[[place for place in order if place < len(effects)]]).p == p


@given(EFFECTS)
def test_p_is_a_chance_and_never_below_the_smallest(effects):
    found = sign_flip(effects, num_flips=100)
    assert 0 < found.smallest_p <= found.p <= 1


def test_random_flips_count_the_measured_one_so_p_is_never_zero():
    found = sign_flip(np.linspace(1, 2, 40), num_flips=99)
    assert found.p == found.smallest_p == 1 / 100


def test_effects_of_exactly_zero_are_no_evidence():
    assert sign_flip(np.zeros(30)).p == 1


@given(arrays(np.float64, (6, 3), elements=st.integers(-9, 9).map(float)))
def test_clusters_are_turned_as_a_whole(effects_CI):
    clusters = np.repeat(list("abcdef"), 3)
    found = sign_flip(effects_CI.ravel(), clusters=clusters)
    assert found.p == every_flip(effects_CI.sum(axis=1).tolist())
    assert found.num_units == 6


def test_items_as_clusters_of_one_change_nothing():
    effects = np.random.default_rng(2).normal(size=9)
    assert sign_flip(effects, clusters=np.arange(9)) == sign_flip(effects)


def test_four_clusters_cannot_reach_five_percent():
    found = sign_flip(np.ones(40), clusters=np.arange(40) % 4)
    assert found.p == found.smallest_p == 2 / 2**4


def test_the_same_seed_gives_the_same_p():
    effects = np.random.default_rng(3).normal(0.2, 1, size=40)
    assert sign_flip(effects, seed=5) == sign_flip(effects, seed=5)
    assert sign_flip(effects, seed=5).p != sign_flip(effects, seed=6).p


def test_the_effect_size_is_students_interval_and_inverts_the_noncentral_t():
    effects = np.random.default_rng(4).normal(0.5, 1.3, size=23)
    found = effect_size(effects)
    low, high = scipy.stats.ttest_1samp(effects, 0).confidence_interval(0.95)
    assert (found.raw_low, found.raw_high) == (pytest.approx(low), pytest.approx(high))
    assert found.raw / found.dz == pytest.approx(effects.std(ddof=1))
    t = found.dz * math.sqrt(23)
    assert scipy.stats.nct.sf(t, 22, found.dz_low * math.sqrt(23)) == pytest.approx(0.025, rel=1e-4)
    assert scipy.stats.nct.cdf(t, 22, found.dz_high * math.sqrt(23)) == pytest.approx(0.025, rel=1e-4)


@given(arrays(np.float64, 12, elements=st.floats(-3, 3), unique=True), st.sampled_from([-2.0, 0.5, 1e4]))
def test_dz_has_no_unit_and_the_raw_effect_has_one(effects, scale):
    found, scaled = effect_size(effects), effect_size(effects * scale)
    assert scaled.dz == pytest.approx(found.dz * np.sign(scale), abs=1e-6)
    assert scaled.raw == pytest.approx(found.raw * scale)
    assert found.raw_low < found.raw < found.raw_high
    assert found.dz_low < found.dz < found.dz_high


def test_dz_of_normal_effects_is_covered_as_often_as_promised():
    rng, covered = np.random.default_rng(5), 0
    for _ in range(2000):
        found = effect_size(rng.normal(0.5, 1, size=15))
        covered += found.dz_low <= 0.5 <= found.dz_high
    assert 0.935 < covered / 2000 < 0.965


def test_positions_are_averaged_within_items_in_the_order_of_items():
    means = item_means([1.0, 2.0, 6.0, 5.0], ["late", "early", "late", "early"])
    np.testing.assert_array_equal(means, [3.5, 3.5])
    rows = item_means([[1.0, 10.0], [3.0, 20.0], [7.0, 0.0]], [8, 8, 2])
    np.testing.assert_array_equal(rows, [[2.0, 15.0], [7.0, 0.0]])


@given(
    arrays(np.float64, (5, 2), elements=st.floats(-9, 9)),
    arrays(np.float64, (5, 2), elements=st.floats(-9, 9)),
    arrays(np.float64, 5, elements=st.floats(-9, 9)),
)
def test_what_a_token_does_by_itself_cancels_from_the_crossed_effect(upstream_IU, planted_IP, effect_I):
    mismatch = np.array([[0.0, 1.0], [1.0, 0.0]])
    measured = upstream_IU[:, :, None] + planted_IP[:, None, :] + effect_I[:, None, None] * mismatch
    np.testing.assert_allclose(crossed_effects(measured), effect_I, atol=1e-12)


def test_crossed_effects_keep_further_axes():
    assert crossed_effects(np.zeros((7, 2, 2, 24))).shape == (7, 24)


@pytest.mark.parametrize("wrong", [[], [[1.0, 2.0]], [[[1.0]]]])
def test_a_test_takes_one_row_of_effects(wrong):
    with pytest.raises(ShapeError, match="item_means"):
        sign_flip(wrong)


def test_numbers_that_are_none_are_refused():
    with pytest.raises(NonFiniteError, match="1 of 3 numbers"):
        sign_flip([1.0, np.nan, 2.0])


def test_effects_without_spread_have_no_size():
    with pytest.raises(NonFiniteError, match="all of them 2"):
        effect_size([2.0, 2.0, 2.0])


def test_wrong_options_and_shapes_are_named():
    with pytest.raises(ConfigError, match="num_flips=0"):
        sign_flip([1.0], num_flips=0)
    with pytest.raises(ShapeError, match="one label for each"):
        sign_flip([1.0, 2.0], clusters=["a"])
    with pytest.raises(ShapeError, match="all four texts"):
        crossed_effects(np.zeros((3, 2, 3)))

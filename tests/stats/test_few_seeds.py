"""A few trained models: intervals that cover, and one that does not."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats import bootstrap, random_effects, seed_interval, sign_agreement

NUM_SIMULATIONS = 5000


def test_students_interval_is_scipys():
    effects = [0.3, -0.1, 0.4, 0.2]
    theirs = scipy.stats.ttest_1samp(effects, 0).confidence_interval(0.9)
    found = seed_interval(effects, level=0.9)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))
    assert found.estimate == pytest.approx(0.2)


@pytest.mark.parametrize("num_seeds", [3, 4, 5])
def test_students_interval_covers_95_percent_of_a_few_seeds(num_seeds):
    rng, covered = np.random.default_rng(num_seeds), 0
    for _ in range(NUM_SIMULATIONS):
        found = seed_interval(rng.normal(size=num_seeds))
        covered += found.low <= 0 <= found.high
    assert covered / NUM_SIMULATIONS == pytest.approx(0.95, abs=0.01)


def test_a_percentile_bootstrap_of_three_seeds_covers_75_percent():
    rng, covered = np.random.default_rng(0), 0
    for trial in range(NUM_SIMULATIONS):
        effects = rng.normal(size=3)
        found = bootstrap(effects, method="percentile", num_resamples=600, seed=trial)
        covered += found.low <= 0 <= found.high
        assert found.low >= effects.min() - 1e-12
    assert covered / NUM_SIMULATIONS == pytest.approx(0.75, abs=0.025)


@pytest.mark.parametrize(("spread", "least"), [(0.0, 0.94), (1.0, 0.93)])
def test_random_effects_cover_whether_models_differ_or_not(spread, least):
    rng, covered = np.random.default_rng(1), 0
    errors = np.array([0.3, 0.4, 0.5, 0.35, 0.3])
    for _ in range(NUM_SIMULATIONS):
        found = random_effects(rng.normal(0, np.sqrt(errors**2 + spread**2)), errors)
        covered += found.low <= 0 <= found.high
    assert least < covered / NUM_SIMULATIONS < 0.97


def test_the_spread_between_models_is_found():
    rng = np.random.default_rng(2)
    errors = np.full(2000, 0.5)
    assert random_effects(rng.normal(0, np.hypot(0.5, 0.8), size=2000), errors).spread == pytest.approx(
        0.8, abs=0.06
    )


def test_equal_errors_make_it_students_interval():
    effects = [0.3, -0.1, 0.4, 0.2]
    found, student = random_effects(effects, [0.1] * 4), seed_interval(effects)
    assert (found.mean, found.low, found.high) == pytest.approx(tuple(student))
    assert found.num_models == 4


def test_without_a_spread_models_count_by_how_well_they_are_known():
    found = random_effects([1.0, 1.1], [0.1, 1.0])
    assert found.spread == 0
    assert found.mean == pytest.approx((100 * 1.0 + 1 * 1.1) / 101)


@given(arrays(np.float64, 4, elements=st.floats(-5, 5)), st.sampled_from([-2.0, 10.0]))
def test_intervals_move_with_shift_and_unit(effects, scale):
    found = random_effects(effects * scale + 1, np.full(4, abs(scale)))
    plain = random_effects(effects, np.ones(4))
    assert found.mean == pytest.approx(plain.mean * scale + 1, abs=1e-9)
    assert found.spread == pytest.approx(plain.spread * abs(scale), abs=1e-6)
    assert found.high - found.low == pytest.approx((plain.high - plain.low) * abs(scale), abs=1e-9)


def test_agreement_counts_models_with_the_sign_of_the_mean():
    assert sign_agreement([0.5, 0.2, -0.1, 0.0]) == 0.5
    assert sign_agreement([-1.0, -2.0, -3.0]) == 1.0
    assert sign_agreement([-1.0, 1.0]) == 0.0


def test_wrong_numbers_are_named():
    with pytest.raises(ShapeError, match="2 effects and 3 errors"):
        random_effects([1.0, 2.0], [1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="an error of 0"):
        random_effects([1.0, 2.0], [1.0, 0.0])
    with pytest.raises(ConfigError, match=r"level=1\.5"):
        seed_interval([1.0, 2.0], level=1.5)
    with pytest.raises(ShapeError, match="2 or more"):
        seed_interval([1.0])

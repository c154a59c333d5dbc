"""Fits of L = A C^-alpha, and the compute that one saves over another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.stats import (
    Interval,
    PowerLaw,
    compute_multiplier,
    needed_seeds,
    paired_power,
    power_law,
)

COMPUTE = np.array([1.0, 3.0, 9.0, 30.0, 80.0])
PAPER = {
    "standard": (1.931, 1.895, 1.829, 1.766, 1.719),
    "block": (1.909, 1.875, 1.809, 1.746, 1.693),
    "full": (1.899, 1.874, 1.804, 1.737, 1.692),
}
"""The paper's Table 2; its C is not published, 6 N D is."""
PAPER_COMPUTE = 6 * np.array([194e6 * 38.7e9, 241e6 * 45.4e9, 296e6 * 62.1e9, 436e6 * 87.9e9, 528e6 * 119e9])


def exact(scale, exponent):
    return power_law(COMPUTE, scale * COMPUTE**-exponent)


@given(st.floats(0.1, 10), st.floats(0.01, 0.9), st.floats(1e-3, 1e3))
def test_an_exact_law_is_found_and_its_unit_changes_the_scale_only(scale, exponent, unit):
    law = exact(scale, exponent)
    assert law.scale.estimate == pytest.approx(scale, rel=1e-9)
    assert law.exponent.estimate == pytest.approx(exponent, rel=1e-9)
    other = power_law(COMPUTE / unit, scale * COMPUTE**-exponent)
    assert other.exponent.estimate == pytest.approx(exponent, rel=1e-8)
    assert other.loss(7.0 / unit) == pytest.approx(law.loss(7.0), rel=1e-9)


def test_intervals_are_those_of_a_regression():
    rng = np.random.default_rng(0)
    losses = 2 * COMPUTE**-0.1 * np.exp(0.01 * rng.standard_normal(5))
    law, other = power_law(COMPUTE, losses), linregress(np.log(COMPUTE), np.log(losses))
    t = 3.182446305284263  # of 3 degrees of freedom
    assert law.exponent.estimate == pytest.approx(-other.slope)
    assert law.exponent.high - law.exponent.estimate == pytest.approx(t * other.stderr)
    assert np.log(law.scale.high / law.scale.estimate) == pytest.approx(t * other.intercept_stderr)
    assert law.scale.low < law.scale.estimate < law.scale.high


def test_intervals_of_95_percent_hold_the_truth_as_often():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        law = power_law(COMPUTE, 2 * COMPUTE**-0.1 * np.exp(0.02 * rng.standard_normal(5)))
        held += law.exponent.low <= 0.1 <= law.exponent.high
    assert 0.92 <= held / 400 <= 0.98


def test_two_points_give_a_line_and_no_interval():
    law = power_law([1.0, 4.0], [2.0, 1.0])
    assert law.exponent == (0.5, -np.inf, np.inf)
    assert law.scale == (2.0, 0.0, np.inf)


@given(st.floats(1.0, 3.0), st.floats(1e-2, 1e2))
def test_a_baseline_needs_so_many_times_the_compute_where_exponents_agree(saving, compute):
    base = exact(2.0, 0.06)
    other = power_law(COMPUTE, 2.0 * (saving * COMPUTE) ** -0.06)
    assert compute_multiplier(base, other, compute) == pytest.approx(saving, rel=1e-6)
    assert compute_multiplier(base, base, compute) == pytest.approx(1.0)


def test_the_papers_table_gives_about_the_papers_exponents_and_saving():
    laws = {arm: power_law(PAPER_COMPUTE / 86_400e15, np.array(losses)) for arm, losses in PAPER.items()}
    for arm, exponent in (("standard", 0.057), ("block", 0.058), ("full", 0.057)):
        assert laws[arm].exponent.estimate == pytest.approx(exponent, abs=0.006)
    assert 1.15 < compute_multiplier(laws["standard"], laws["block"], 4.36) < 1.35


@pytest.mark.parametrize(
    ("compute", "losses", "error"),
    [
        ([1.0], [1.0], ShapeError),
        ([1.0, 1.0], [1.0, 2.0], ShapeError),
        ([1.0, 2.0], [1.0, 2.0, 3.0], ShapeError),
        ([0.0, 2.0], [1.0, 2.0], ConfigError),
        ([1.0, 2.0], [1.0, -2.0], ConfigError),
        ([1.0, 2.0], [1.0, np.nan], NonFiniteError),
    ],
)
def test_what_is_no_law_is_refused(compute, losses, error):
    with pytest.raises(error):
        power_law(compute, losses)


def test_a_multiplier_needs_a_baseline_that_gains_from_compute():
    rising = PowerLaw(Interval(1, 1, 1), Interval(-0.1, -0.1, -0.1), 0.0)
    with pytest.raises(ConfigError, match=r"alpha=-0\.1"):
        compute_multiplier(rising, rising, 1.0)
    with pytest.raises(ConfigError, match="compute=0"):
        compute_multiplier(exact(1.0, 0.1), rising, 0.0)


def test_a_pilot_says_how_many_seeds_find_an_effect():
    gaps = [0.01, 0.03, 0.05]  # a spread of 0.02
    needed = needed_seeds(gaps, 0.02)
    assert paired_power(1.0, needed) >= 0.8 > paired_power(1.0, needed - 1)
    assert needed_seeds(gaps, -0.02) == needed
    assert needed_seeds(gaps, 0.01) > needed
    with pytest.raises(ConfigError, match="all the same"):
        needed_seeds([0.5, 0.5], 0.02)

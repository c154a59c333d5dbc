"""Power and needed items, against another distribution, simulation and the published table."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError
from attention_residuals.stats import check_items, needed_items, paired_power


def by_noncentral_t(dz, num_items, alpha):
    critical = scipy.stats.t.isf(alpha / 2, num_items - 1)
    place = dz * math.sqrt(num_items)
    lower = np.nan_to_num(scipy.stats.nct.cdf(-critical, num_items - 1, place))  # NaN for 0 in its far tail
    return scipy.stats.nct.sf(critical, num_items - 1, place) + lower


@pytest.mark.parametrize("dz", [-0.4, 0.05, 0.2, 0.8])
@pytest.mark.parametrize("num_items", [3, 20, 300])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_power_is_that_of_the_noncentral_t(dz, num_items, alpha):
    expected = by_noncentral_t(abs(dz), num_items, alpha)
    assert paired_power(dz, num_items, alpha=alpha) == pytest.approx(expected, rel=1e-6, abs=1e-10)


def test_power_is_how_often_students_test_finds_the_effect():
    effects = np.random.default_rng(0).normal(0.5, 1, size=(20_000, 20))
    found = scipy.stats.ttest_1samp(effects, 0, axis=1).pvalue <= 0.01
    assert found.mean() == pytest.approx(paired_power(0.5, 20, alpha=0.01), abs=0.01)


@pytest.mark.parametrize(
    ("dz", "needed"), [(0.2, (199, 433, 555)), (0.3, (90, 196, 251)), (0.5, (34, 74, 95))]
)
def test_needed_items_for_one_test_for_50_rows_and_for_400_cells(dz, needed):
    assert tuple(needed_items(dz, num_tests=tests) for tests in (1, 50, 400)) == needed
    for tests, number in zip((1, 50, 400), needed, strict=True):
        assert (
            by_noncentral_t(dz, number, 0.05 / tests) >= 0.8 > by_noncentral_t(dz, number - 1, 0.05 / tests)
        )


@given(st.floats(0.15, 3), st.floats(0.3, 0.95), st.integers(1, 100))
def test_needed_items_are_enough_and_one_less_is_not(dz, power, num_tests):
    needed = needed_items(dz, power=power, num_tests=num_tests)
    alpha = 0.05 / num_tests
    assert paired_power(dz, needed, alpha=alpha) >= power
    assert needed == 2 or paired_power(dz, needed - 1, alpha=alpha) < power
    assert needed_items(-dz, power=power, num_tests=num_tests) == needed


def test_without_an_effect_power_is_the_rate_of_false_alarms():
    assert paired_power(0.0, 50, alpha=0.02) == pytest.approx(0.02)


def test_enough_items_pass_and_too_few_are_told_how_many_are_needed():
    check_items(199, 0.2)
    with pytest.raises(ConfigError, match=r"433 items or more[\s\S]*34 more"):
        check_items(399, 0.2, num_tests=50)


@pytest.mark.parametrize(
    "call",
    [
        lambda: paired_power(0.3, 1),
        lambda: paired_power(math.nan, 10),
        lambda: paired_power(0.3, 10, alpha=0.0),
        lambda: needed_items(0.0),
        lambda: needed_items(1e-5),
        lambda: needed_items(0.3, power=0.01),
        lambda: needed_items(0.3, num_tests=0),
    ],
)
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(ConfigError):
        call()

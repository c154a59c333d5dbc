"""Effects beyond surprise, and shares of effects: second routes, coverage, refusals."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.stats import ancova, restoration


def edits(seed=0, effect=1.5, slope=0.4):
    rng = np.random.default_rng(seed)
    items, kinds = np.tile(np.arange(30), 2), np.repeat([True, False], 30)
    surprisals = 3 + kinds + rng.normal(size=60)
    changes = 2 + effect * kinds + slope * surprisals + rng.normal(size=30)[items] + 0.3 * rng.normal(size=60)
    return changes, surprisals, kinds, items


def sandwich(changes, surprisals, kinds, items):
    """The same regression, uncentred, with a solver and sums over clusters written out."""
    terms = np.column_stack([np.ones(len(changes)), kinds, surprisals]).astype(float)
    found, *_ = np.linalg.lstsq(terms, changes, rcond=None)
    left, meat = changes - terms @ found, np.zeros((3, 3))
    for item in set(items.tolist()):
        score = sum(terms[row] * left[row] for row in np.flatnonzero(items == item))
        meat += np.outer(score, score)
    bread = np.linalg.inv(terms.T @ terms)
    groups, count = len(set(items.tolist())), len(changes)
    variance = groups / (groups - 1) * (count - 1) / (count - 3) * (bread @ meat @ bread)
    return found, np.sqrt(variance[1, 1]), groups - 1


def test_ancova_is_the_regression_with_clustered_errors():
    found = ancova(*edits())
    coefficients, error, df = sandwich(*edits())
    assert (found.effect, found.slope) == pytest.approx((coefficients[1], coefficients[2]))
    reach = scipy.stats.t.ppf(0.975, df) * error
    assert (found.low, found.high) == pytest.approx((found.effect - reach, found.effect + reach))
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(abs(found.effect) / error, df))
    assert found.num_clusters == 30


def test_an_effect_is_found_beside_surprise_and_none_is_made_of_it():
    assert ancova(*edits(effect=1.5)).effect == pytest.approx(1.5, abs=0.5)
    assert ancova(*edits(effect=1.5)).p < 0.001
    assert ancova(*edits(effect=0.0)).p > 0.05


@given(st.sampled_from([0.5, 3.0]), st.sampled_from([-2.0, 7.0]))
def test_units_and_shifts_of_surprisal_do_not_change_the_effect(scale, shift):
    changes, surprisals, kinds, items = edits()
    found, moved = ancova(*edits()), ancova(changes, scale * surprisals + shift, kinds, items)
    assert moved[:4] == pytest.approx(found[:4])
    assert moved.slope == pytest.approx(found.slope / scale)


def test_what_cannot_be_compared_is_refused():
    changes, surprisals, kinds, items = edits()
    with pytest.raises(ConfigError, match="60 contradictions of 60 edits"):
        ancova(changes, surprisals, np.ones(60, dtype=bool), items)
    with pytest.raises(ConfigError, match="surprisals that vary"):
        ancova(changes, 3.0 * kinds, kinds, items)
    with pytest.raises(ShapeError, match=r"1 cluster\(s\)"):
        ancova(changes, surprisals, kinds, np.zeros(60))
    with pytest.raises(ShapeError, match="four rows of one length"):
        ancova(changes, surprisals, kinds[:-1], items)


def test_a_perfect_fit_leaves_no_doubt():
    kinds = np.arange(8) % 2 == 0
    flat = ancova(np.zeros(8), np.arange(8.0), kinds, np.arange(8))
    assert (flat.effect, flat.p) == (0.0, 1.0)


def paired_shares(rng, number, share, total=1.0):
    common = rng.normal(size=number)
    whole = total + common
    return share * whole + 0.5 * rng.normal(size=number), whole


def test_a_share_is_covered_as_often_as_promised():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(3000):
        found = restoration(*paired_shares(rng, 40, 0.6))
        covered += found.low <= 0.6 <= found.high
    assert covered / 3000 == pytest.approx(0.95, abs=0.015)


def test_the_ends_are_where_students_test_of_the_difference_turns():
    one, whole = paired_shares(np.random.default_rng(1), 25, 0.6)
    found = restoration(one, whole)
    assert found.estimate == pytest.approx(one.mean() / whole.mean())
    for end in (found.low, found.high):
        assert scipy.stats.ttest_1samp(one - end * whole, 0).pvalue == pytest.approx(0.05)


@given(st.sampled_from([-3.0, 0.1, 40.0]))
def test_a_share_has_no_unit(scale):
    one, whole = paired_shares(np.random.default_rng(2), 25, 0.6)
    assert tuple(restoration(scale * one, scale * whole)) == pytest.approx(tuple(restoration(one, whole)))


def test_everything_restored_is_a_share_of_one():
    _, whole = paired_shares(np.random.default_rng(3), 25, 0.6)
    assert tuple(restoration(whole, whole)) == pytest.approx((1.0, 1.0, 1.0), abs=1e-6)


def test_a_total_effect_that_may_be_zero_is_refused():
    rng = np.random.default_rng(4)
    with pytest.raises(NonFiniteError, match="may be 0"):
        restoration(rng.normal(size=20), rng.normal(size=20))


def test_wrong_shapes_and_levels_are_named():
    with pytest.raises(ShapeError, match="3 restored and 4 total"):
        restoration([1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ConfigError, match=r"level=0\.0"):
        restoration([1.0, 2.0, 3.0], [5.0, 5.5, 6.0], level=0.0)

"""Bootstrap intervals: against another implementation, and how often they hold the truth."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats import bootstrap


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_an_interval_is_scipys_up_to_chance(method):
    effects = np.random.default_rng(0).exponential(size=25)
    ours = bootstrap(effects, method=method, num_resamples=40_000)
    theirs = scipy.stats.bootstrap(
        (effects,), np.mean, method=method, n_resamples=40_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.012)
    assert ours.estimate == effects.mean()


def test_bca_moves_towards_the_long_tail_and_percentiles_do_not():
    effects = np.random.default_rng(0).exponential(size=25)
    bca, percentile = bootstrap(effects), bootstrap(effects, method="percentile")
    assert bca.low > percentile.low + 0.01
    assert bca.high > percentile.high + 0.03


@given(
    arrays(np.float64, 6, elements=st.integers(-9, 9).map(float)),
    st.sampled_from([2.0, 0.25]),
    st.sampled_from(["bca", "percentile"]),
)
def test_an_interval_moves_with_shift_and_unit_and_holds_what_resampling_can_reach(effects, scale, method):
    found = bootstrap(effects, num_resamples=200, method=method)
    moved = bootstrap(effects * scale + 8, num_resamples=200, method=method)
    assert moved == pytest.approx([one * scale + 8 for one in found])
    assert effects.min() - 1e-9 <= found.low <= found.high <= effects.max() + 1e-9


def test_effects_that_are_all_alike_leave_no_doubt():
    assert tuple(bootstrap([0.3, 0.3, 0.3], num_resamples=50)) == pytest.approx((0.3, 0.3, 0.3))


def test_a_higher_level_gives_a_wider_interval():
    effects = np.random.default_rng(2).normal(size=30)
    narrow, wide = bootstrap(effects, level=0.8), bootstrap(effects, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_clusters_of_one_item_are_resampled_like_items():
    effects = np.random.default_rng(3).normal(size=40)
    plain = bootstrap(effects, num_resamples=20_000)
    clustered = bootstrap(effects, clusters=np.arange(40), num_resamples=20_000)
    assert tuple(clustered) == pytest.approx(tuple(plain), abs=0.02)


def test_what_clusters_share_widens_the_interval():
    rng = np.random.default_rng(4)
    effects = np.repeat(rng.normal(size=12), 20) + 0.1 * rng.normal(size=240)
    clusters = np.repeat(np.arange(12), 20)
    plain = bootstrap(effects, num_resamples=2000)
    clustered = bootstrap(effects, clusters=clusters, num_resamples=2000)
    assert clustered.high - clustered.low > 3 * (plain.high - plain.low)


def test_clusters_of_different_sizes_are_resampled_with_their_sizes():
    effects = np.array([1.0, 1.0, 1.0, 5.0])
    found = bootstrap(effects, clusters=["big", "big", "big", "small"], method="percentile", level=0.9)
    # Both drawn, the big one twice, or the small one twice: means 2, 1 and 5, with chances 1/2, 1/4, 1/4.
    assert found == pytest.approx((2.0, 1.0, 5.0))


def test_bca_covers_the_mean_of_skewed_effects_more_often_than_percentiles():
    rng, covered = np.random.default_rng(5), {"bca": 0, "percentile": 0}
    for trial in range(1500):
        effects = rng.lognormal(size=25)
        for method in covered:
            found = bootstrap(effects, method=method, num_resamples=500, seed=trial)
            covered[method] += found.low <= np.exp(0.5) <= found.high
    assert covered["bca"] > covered["percentile"] + 10


def test_resampling_templates_covers_where_resampling_items_does_not():
    rng, covered = np.random.default_rng(6), {"templates": 0, "items": 0}
    templates = np.repeat(np.arange(16), 6)
    for trial in range(600):
        effects = rng.normal(size=16)[templates] + rng.normal(size=96)
        for what, clusters in (("templates", templates), ("items", None)):
            options = {"method": "percentile", "num_resamples": 300, "seed": trial}
            found = bootstrap(effects, clusters=clusters, **options)
            covered[what] += found.low <= 0 <= found.high
    assert 0.91 < covered["templates"] / 600 < 0.98
    assert covered["items"] / 600 < 0.75


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match=r"level=95"):
        bootstrap([1.0, 2.0], level=95.0)
    with pytest.raises(ConfigError, match="num_resamples=0"):
        bootstrap([1.0, 2.0], num_resamples=0)
    with pytest.raises(ShapeError, match="one cluster"):
        bootstrap([1.0, 2.0], clusters=["a", "a"])

"""How often tests give false alarms and find what is there, by simulation; and the traps that they avoid."""

import numpy as np
import pytest

from attention_residuals.stats import (
    ancova,
    benjamini_hochberg,
    benjamini_yekutieli,
    item_means,
    max_t,
    paired_power,
    sign_flip,
)

NUM_SIMULATIONS = 5000
# A rate of 5 % from 5000 simulations is known to +- 0.3 %.
NOMINAL = (0.04, 0.06)


def rate(simulate, number=NUM_SIMULATIONS, **options):
    """Share of simulations in which the sign flip finds something at 5 %."""
    options = {"num_flips": 499, **options}
    return np.mean([sign_flip(simulate(), seed=trial, **options).p <= 0.05 for trial in range(number)])


def within(value, bounds):
    return bounds[0] <= value <= bounds[1]


def test_items_give_five_percent_false_alarms_whether_normal_or_heavy_tailed():
    rng = np.random.default_rng(0)
    assert within(rate(lambda: rng.normal(size=30)), NOMINAL)
    assert within(rate(lambda: rng.standard_t(2, size=30)), NOMINAL)


def test_the_power_is_what_the_calculation_says():
    rng = np.random.default_rng(1)
    found = rate(lambda: rng.normal(0.3, 1, size=90))
    assert found == pytest.approx(paired_power(0.3, 90), abs=0.02)
    assert found == pytest.approx(0.8, abs=0.025)


CLUSTERS = np.repeat(np.arange(14), 6)


def clustered(rng, effect=0.0):
    return effect + rng.normal(size=14)[CLUSTERS] + rng.normal(size=84)


def test_clustered_items_give_five_percent_when_clusters_are_turned_and_far_more_when_items_are():
    rng = np.random.default_rng(2)
    assert within(rate(lambda: clustered(rng), clusters=CLUSTERS), NOMINAL)
    assert rate(lambda: clustered(rng), number=500) > 0.25


def test_turned_clusters_still_find_an_effect():
    rng = np.random.default_rng(3)
    assert rate(lambda: clustered(rng, effect=1.2), number=500, clusters=CLUSTERS) > 0.9


ITEMS = np.repeat(np.arange(20), 20)


def tokens(rng):
    """20 tokens of each of 20 items, without an effect; half of the variance is the item's."""
    return rng.normal(size=20)[ITEMS] + rng.normal(size=400)


def test_tokens_taken_as_independent_give_false_alarms_in_half_of_all_studies():
    rng = np.random.default_rng(4)
    assert rate(lambda: tokens(rng), number=500) > 0.4
    assert within(rate(lambda: item_means(tokens(rng), ITEMS)), NOMINAL)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def divergence(one, other):
    middle = (one + other) / 2
    return 0.5 * (one * np.log(one / middle) + other * np.log(other / middle)).sum(axis=-1)


def test_a_divergence_tested_against_zero_finds_noise_and_a_signed_change_does_not():
    rng = np.random.default_rng(5)

    def noise(kind):
        one, other = softmax(rng.normal(size=(2, 30, 8)) * 0.1)
        return divergence(one, other) if kind == "divergence" else (one - other)[:, 0]

    assert rate(lambda: noise("divergence"), number=300) == 1.0
    assert within(rate(lambda: noise("signed")), NOMINAL)


def correlated(rng, size, num_cells, shared):
    return np.sqrt(shared) * rng.normal(size=(size, 1)) + np.sqrt(1 - shared) * rng.normal(
        size=(size, num_cells)
    )


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_max_t_claims_a_false_cell_in_five_percent_of_studies_though_others_are_true(shared):
    rng, false, found, single = np.random.default_rng(6), 0, 0.0, 0
    for trial in range(2500):
        effects = correlated(rng, 25, 12, shared)
        effects[:, :2] += 1.2
        p = max_t(effects, num_flips=199, seed=trial)
        false += (p[2:] <= 0.05).any()
        found += (p[:2] <= 0.05).mean()
        single += np.abs(effects[:, 2:].mean(0) / effects[:, 2:].std(0, ddof=1) * 5 > 2.06).any()
    assert false / 2500 <= 0.06
    assert found / 2500 > 0.95
    assert single / 2500 > 0.1  # what taking each cell for the only one does


@pytest.mark.slow
def test_max_t_under_the_null_is_at_five_percent_exactly_and_with_clusters_too():
    rng, plain, grouped = np.random.default_rng(7), 0, 0
    clusters = np.repeat(np.arange(12), 3)
    for trial in range(NUM_SIMULATIONS):
        plain += (max_t(correlated(rng, 25, 12, 0.3), num_flips=499, seed=trial) <= 0.05).any()
        effects = correlated(rng, 12, 8, 0.3)[clusters] + rng.normal(size=(36, 8))
        grouped += (max_t(effects, clusters=clusters, num_flips=499, seed=trial) <= 0.05).any()
    assert within(plain / NUM_SIMULATIONS, NOMINAL)
    assert within(grouped / NUM_SIMULATIONS, NOMINAL)


def false_shares(adjust, one_sided_p):
    """Mean share of false marks, where the first 10 of 50 cells are true."""
    marks = np.stack([adjust(p) <= 0.05 for p in one_sided_p])
    return (marks[:, 10:].sum(1) / np.maximum(1, marks.sum(1))).mean(), marks[:, :10].mean()


def test_benjamini_hochberg_keeps_the_share_of_false_marks_and_yekutieli_marks_less():
    rng = np.random.default_rng(8)
    uniform = rng.random((NUM_SIMULATIONS, 50))
    uniform[:, :10] **= 6  # small p where an effect is
    share, found = false_shares(benjamini_hochberg, uniform)
    assert share == pytest.approx(0.05 * 40 / 50, abs=0.008)  # exact for independent cells
    stricter, fewer = false_shares(benjamini_yekutieli, uniform)
    assert stricter < share / 2
    assert 0 < fewer < found


def test_ancova_gives_five_percent_where_routing_follows_surprise_only():
    rng, alarms, naive = np.random.default_rng(9), 0, 0
    items, kinds = np.tile(np.arange(40), 2), np.repeat([True, False], 40)
    number = 2000
    for _ in range(number):
        surprisals = np.where(kinds, 4.0, 3.0) + rng.normal(size=80)
        changes = 0.5 * surprisals + 0.7 * rng.normal(size=40)[items] + rng.normal(size=80)
        alarms += ancova(changes, surprisals, kinds, items).p <= 0.05
        naive += sign_flip(changes[:40] - changes[40:], num_flips=99).p <= 0.05
    assert within(alarms / number, (0.035, 0.065))
    assert naive / number > 0.4

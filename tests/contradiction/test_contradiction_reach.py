"""Pairs of routes against the sum of both, and how far weights move at a fixed cost."""

import numpy as np
import pytest
import torch
from contradiction_fixtures import STUDY, model_with

from attention_residuals import record
from attention_residuals.contradiction import exclusivity, interactions, measure, patched
from attention_residuals.contradiction.exclusivity import BOUND, reaches, searched_sites
from attention_residuals.contradiction.interactions import interaction_effects
from attention_residuals.trace import freedom

ITEMS = STUDY.items("pilot", "main", 12)[::4]  # of one template
MANY = STUDY.items("pilot", "main", 64)
ROUTES = ("L1.mlp < embedding", "L2.attention < embedding", "L2.mlp < B1")
CLUSTERS = [str(number) for number in range(8)]


def test_pairs_are_what_patches_give_one_by_one():
    model = model_with()
    found = interactions.interactions(model, ITEMS, CLUSTERS[:3], ROUTES, num_draws=20)
    assert len(found) == 6
    for pair in found:
        one, other, both = (
            patched(model, ITEMS, routes, patch="weights", direction=pair.direction)
            for routes in ([pair.first], [pair.second], [pair.first, pair.second])
        )
        towards = np.sign(both.total["answer"].mean())
        expected = towards * (both.moved["answer"] - one.moved["answer"] - other.moved["answer"])
        assert pair.beyond.estimate == pytest.approx(expected.mean(), abs=1e-6)
        assert pair.first_alone == pytest.approx(towards * one.moved["answer"].mean(), abs=1e-6)
        assert pair.together == pytest.approx(towards * both.moved["answer"].mean(), abs=1e-6)
    assert max(abs(pair.beyond.estimate) for pair in found) > 1e-5


def made_up_moves(beyond, total=-1.0):
    """Moves of three routes that add up, but for what the first pair does in one direction."""

    def moved(model, items, sets, *, direction):
        rng = np.random.default_rng(len(direction))
        alone = rng.normal(size=(3, len(items))) + 1
        pairs = [(0, 1), (0, 2), (1, 2)]
        together = [alone[a] + alone[b] + 0.1 * rng.normal(size=len(items)) for a, b in pairs]
        if direction == "repair":
            together[0] += beyond
        assert sets == [[route] for route in ROUTES] + [[ROUTES[a], ROUTES[b]] for a, b in pairs]
        return np.array([*alone, *together]), np.full(len(items), total)

    return moved


@pytest.mark.parametrize("total", [1.0, -1.0])
def test_a_planted_interaction_is_found_with_its_sign_and_no_other(monkeypatch, total):
    monkeypatch.setattr(interactions, "moved_answers", made_up_moves(-0.5, total))
    clusters = [str(number % 16) for number in range(64)]
    first, *others = interactions.interactions(model_with(), MANY, clusters, ROUTES, num_draws=2000)
    assert (first.first, first.second, first.direction) == (*ROUTES[:2], "repair")
    assert first.family_p <= 0.01
    # Where the other text is below this one, less movement is movement away from it turned round.
    assert first.beyond.estimate == pytest.approx(-0.5 * np.sign(total), abs=0.1)
    assert first.together == pytest.approx(first.first_alone + first.second_alone - 0.5 * total, abs=0.1)
    assert min(pair.family_p for pair in others) > 0.05


def test_pairs_that_add_up_are_seldom_named(monkeypatch):
    monkeypatch.setattr(interactions, "moved_answers", made_up_moves(0.0))
    found = interactions.interactions(model_with(), MANY, CLUSTERS * 8, ROUTES, num_draws=500)
    assert min(pair.family_p for pair in found) > 0.05


def test_routes_that_do_nothing_do_nothing_together():
    found = interactions.interactions(model_with(queries=False), ITEMS, CLUSTERS[:3], ROUTES, num_draws=20)
    assert all(pair.beyond.estimate == 0 and pair.family_p == 1 for pair in found)


def test_a_pair_is_compared_with_the_sum():
    assert interaction_effects(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 5.0]]), [(0, 1)]).tolist() == [[1, -1]]


def test_reads_of_claims_and_of_routes_are_searched():
    sites = ["L0.mlp", "L1.attention", "L1.mlp", "L2.attention", "L2.mlp", "output"]
    assert searched_sites(sites, ["L2.mlp < B1", "L0.mlp < embedding"]) == (
        "L0.mlp",
        "L1.attention",
        "L2.mlp",
    )


def test_a_search_stays_within_its_cost_and_says_what_the_contradiction_moves():
    model, items = model_with(), ITEMS[:2]
    (found,) = reaches(model, items, ["L2.attention"])
    assert found.divergence <= BOUND
    assert found.divergence <= found.largest_divergence
    assert 0 < found.least <= found.moved <= found.most <= 1
    assert found.moved <= found.farthest
    at = items[0].places["answer"]
    apart = []
    for item in items:
        weights = record(model, torch.from_numpy(item.ids[0]))["L2.attention"].weights[..., at]
        apart.append((weights[:, 1] - weights[:, 0]).abs().sum().item() / 2)
    assert found.pair == pytest.approx(np.mean(apart), abs=1e-6)
    assert found.pair > 1e-4


def test_what_may_cost_more_reaches_farther():
    near, far = (reaches(model_with(), ITEMS[:2], ["output"], bound=bound)[0] for bound in (1e-5, 10.0))
    assert near.moved < far.moved
    assert near.divergence <= 1e-5
    assert far.moved > 0.8 * far.farthest
    assert near.same_answers == 1
    assert near.moved_same == pytest.approx(near.moved)
    assert far.same_answers < 1
    assert far.moved_same < far.moved


def test_items_of_two_shapes_are_all_counted():
    items = [STUDY.items("pilot", "main", 8)[number] for number in (0, 1)]
    assert measure(model_with(), items).items == tuple(item.name for item in items)
    alone = [reaches(model_with(), [item], ["L1.mlp"])[0] for item in items]
    (both,) = reaches(model_with(), items, ["L1.mlp"])
    assert both.pair == pytest.approx(np.mean([one.pair for one in alone]), abs=1e-6)
    assert both.farthest == pytest.approx(np.mean([one.farthest for one in alone]), abs=1e-6)


def test_a_search_tries_so_often_as_it_says(monkeypatch):
    given = []

    def watched(*arguments, **options):
        given.append(options)
        return freedom(*arguments, **{**options, "num_steps": 1})

    monkeypatch.setattr(exclusivity, "freedom", watched)
    reaches(model_with(), ITEMS[:1], ["L1.mlp"])
    assert given[0]["num_steps"] == exclusivity.NUM_STEPS
    assert given[0]["counted"].sum(1).tolist() == [1, 1]

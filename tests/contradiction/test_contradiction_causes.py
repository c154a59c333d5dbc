"""Patches of routes: all of them make one text the other, routing alone does what routing does, and no more."""

import numpy as np
import pytest
import torch
from contradiction_fixtures import STUDY, model_with
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.contradiction import measure, patched, swept_routes
from attention_residuals.contradiction.causal import matched_mass, routed_weights

ITEMS = STUDY.items("pilot", "main", 8)[::4]  # of one template


@pytest.fixture(scope="module")
def cells():
    return measure(model_with(), ITEMS[:1]).cells


@pytest.mark.parametrize("direction", ["repair", "break"])
def test_everything_after_the_plant_makes_one_text_the_other(cells, direction):
    found = patched(model_with(), ITEMS, cells, patch="both", direction=direction)
    for metric in ("answer", "verdict"):
        assert np.abs(found.total[metric]).max() > 1e-3
        assert np.allclose(found.moved[metric], found.total[metric], atol=1e-5)


def test_repairing_starts_from_the_contradictory_text(cells):
    answer = measure(model_with(), ITEMS)["answer"]
    apart = (answer[:, 0, 0] + answer[:, 1, 1] - answer[:, 0, 1] - answer[:, 1, 0]) / 2
    repair, broken = (
        patched(model_with(), ITEMS, cells[:1], patch="weights", direction=direction)
        for direction in ("repair", "break")
    )
    assert np.abs(apart).max() > 1e-3
    assert np.allclose(repair.total["answer"], apart, atol=1e-4)
    assert np.allclose(broken.total["answer"], -apart, atol=1e-4)


def test_items_keep_their_order(cells):
    every = STUDY.items("pilot", "main", 8)
    items = [every[0], every[1], every[4]]  # the first and the last are of one template, and run together
    found = patched(model_with(), items, cells, patch="weights", direction="repair")
    alone = patched(model_with(), items[1:2], cells, patch="weights", direction="repair")
    assert np.allclose(found.moved["answer"][1], alone.moved["answer"][0], atol=1e-5)
    assert np.abs(found.moved["answer"][1] - found.moved["answer"][2]) > 1e-4


def test_a_model_that_routes_every_text_alike_has_no_effect_of_routing(cells):
    model = model_with(queries=False)
    weights = patched(model, ITEMS, cells, patch="weights", direction="repair")
    values = patched(model, ITEMS, cells, patch="values", direction="repair")
    assert np.abs(weights.moved["answer"]).max() == 0
    assert weights.mass.max() == 0
    assert np.allclose(values.moved["answer"], values.total["answer"], atol=1e-5)


def test_the_one_site_that_routes_by_input_is_found(cells):
    model = model_with(queries=False)
    named = dict(model.named_parameters())
    named["residual.readers.L2_attention.pseudo_query"].normal_()
    found = swept_routes(model, ITEMS, cells)
    for effects in found.values():
        moving = {cells[number].split(" < ")[0] for number in np.flatnonzero(effects > 1e-7)}
        assert moving == {"L2.attention"}


def test_random_routes_move_as_much_weight(cells):
    some = [cell for cell in cells if cell.startswith("L2.mlp < emb")]
    chosen = patched(model_with(), ITEMS, some, patch="weights", direction="break")
    random = [
        patched(model_with(), ITEMS, some, patch="random", direction="break", seed=seed) for seed in (1, 2)
    ]
    assert chosen.mass.min() > 0
    for one in random:
        assert np.allclose(one.mass, chosen.mass, rtol=1e-5)
    assert not np.allclose(random[0].moved["answer"], random[1].moved["answer"])


@given(st.integers(2, 6), st.integers(0, 1000))
def test_weights_stay_weights(count, seed):
    draws = torch.Generator().manual_seed(seed)
    own, other = (torch.rand(count, 2, 3, generator=draws).softmax(0) for _ in range(2))
    for sources in ([0], [count - 1, 0], list(range(count))):
        found = routed_weights(own, other, sources)
        assert torch.allclose(found.sum(0), torch.ones(2, 3))
        assert torch.equal(found[sources], other[sources])
        assert torch.equal(routed_weights(own, own.clone(), sources), own)
    for changed in (routed_weights(own, other, [0]), torch.eye(count)[own.argmin(0)].permute(2, 0, 1)):
        moved = matched_mass(own, changed, draws)
        assert torch.allclose(moved.sum(0), torch.ones(2, 3))
        assert (moved >= -1e-7).all()
        assert torch.allclose((moved - own).abs().sum(0), (changed - own).abs().sum(0), atol=1e-6)

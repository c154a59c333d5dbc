"""Sequences leave a cache and join one, and what would make it wrong is refused."""

import pytest
import torch
from closeness import assert_close

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.inference import KVCache, prefill
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, presets

TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(config=AttnRes(), num_layers=3, dtype=torch.float64):  # noqa: B008
    model = Decoder(presets.scaled(num_layers, vocab_size=40, max_tokens=16, residual=config)).to(dtype)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model.requires_grad_(False)


def test_sequences_leave_and_join_a_cache():
    model = model_of(AttnRes(sublayers_per_block=2))
    cache = prefill(model, TOKENS[:, :6]).cache
    cache.keep([1], start=0)
    cache.join(prefill(model, TOKENS[:1, :4]).cache)
    mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    assert torch.equal(cache.mask(1), mask)
    positions, newest = torch.tensor([[6], [4]]), torch.tensor([[3], [8]])
    logits = model(newest, cache=cache, mask=mask, positions=positions)
    alone = [torch.cat([TOKENS[1:, :6], newest[:1]], dim=1), torch.cat([TOKENS[:1, :4], newest[1:]], dim=1)]
    for row, text in enumerate(alone):
        assert_close(logits[row, 0], model(text)[0, -1])
    cache.keep([1], start=2)
    assert cache.num_tokens == 5
    assert cache.padding == (0,)
    longer = torch.cat([alone[1], newest[:1]], dim=1)
    assert_close(model(newest[:1], cache=cache)[0, 0], model(longer)[0, -1])


def test_an_empty_cache_takes_over_what_joins_and_adds_nothing():
    model, cache = model_of(), KVCache()
    cache.join(prefill(model, TOKENS[:, :4]).cache)
    cache.join(KVCache())
    assert (cache.num_tokens, cache.padding) == (4, (0, 0))
    assert_close(model(TOKENS[:, 4:5], cache=cache)[:, 0], model(TOKENS[:, :5])[:, -1])


def test_padding_counts_along():
    model, cache = model_of(), prefill(model_of(), TOKENS[:, :2]).cache
    cache.join(prefill(model, TOKENS[:1, :5]).cache)
    cache.join(prefill(model, TOKENS[:1, :6]).cache)
    assert cache.padding == (4, 4, 1, 0)
    cache.keep([3, 2, 0], start=1)
    assert (cache.num_tokens, cache.padding) == (5, (0, 0, 3))
    cache.keep([2], start=5)
    assert (cache.num_tokens, cache.padding) == (0, (0,))
    model(TOKENS[:, :3], cache=cache)
    assert cache.padding == (0, 0)


@pytest.mark.parametrize(("rows", "start"), [([0], 10), ([0], -1), ([2], 0), ([-1], 0)])
def test_only_what_is_there_can_be_kept(rows, start):
    cache = prefill(model_of(), TOKENS[:, :4]).cache
    with pytest.raises(ShapeError, match="some of 2 sequences, from 0 to 4 on"):
        cache.keep(rows, start=start)
    assert (cache.num_tokens, cache.padding) == (4, (0, 0))


@pytest.mark.parametrize("other", [{"num_layers": 2}, {"num_layers": 4}, {"dtype": torch.float32}], ids=str)
def test_the_cache_of_another_model_does_not_join(other):
    model, foreign = model_of(), prefill(model_of(**other), TOKENS[:, :6]).cache
    cache = prefill(model, TOKENS[:, :4]).cache
    with pytest.raises(ShapeError, match="expected: one of 3 layers with"):
        cache.join(foreign)
    assert_close(model(TOKENS[:, 4:5], cache=cache)[:, 0], model(TOKENS[:, :5])[:, -1])


def test_a_cache_made_in_inference_mode_can_be_used_outside_and_inside_again():
    model = model_of()
    with torch.inference_mode():
        cache = prefill(model, TOKENS[:, :4]).cache
        model(TOKENS[:, 4:5], cache=cache)
    outside = model(TOKENS[:, 5:6], cache=cache)
    with torch.inference_mode():
        inside = model(TOKENS[:, 6:7], cache=cache)
    whole = model(TOKENS[:, :7])
    assert_close(outside[:, 0], whole[:, 5])
    assert_close(inside[:, 0], whole[:, 6])


def test_a_pass_that_asks_for_gradients_is_refused_before_anything_is_kept():
    model, cache = model_of().requires_grad_(True), KVCache()
    with pytest.raises(ConfigError, match="no_grad"):
        model(TOKENS, cache=cache)
    with torch.no_grad():
        model(TOKENS, cache=cache)
    assert cache.num_tokens == 9

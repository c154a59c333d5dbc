"""How far apart the routing of two texts is."""

import math
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from stats.planted import TOKENS, model_of, one_hot, planted

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.stats import (
    pair_contrast,
    pair_distance,
)
from attention_residuals.trace import record

SITE = "output"


def softmax_weights(seed, count=4, shape=(1, 50), scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, *shape, generator=generator, dtype=torch.float64)).softmax(0)


def test_the_same_routing_is_no_distance_apart_and_other_sources_ln_2():
    one, other = planted(one_hot(0, 3)), planted(one_hot(2, 3))
    ln_2 = torch.full((1, 3), math.log(2), dtype=torch.float64)
    apart, same = pair_distance(one, other, SITE), pair_distance(one, one, SITE)
    assert_close(apart.divergence, ln_2)
    assert_close(apart.distance, ln_2.sqrt())
    assert (apart.change[2] > 0).all()
    assert (apart.change[0] < 0).all()
    assert same.divergence.eq(0).all()
    assert same.change.eq(0).all()
    assert_close(pair_contrast(one, other, one, SITE), ln_2)
    assert_close(pair_contrast(one, one, other, SITE), -ln_2)
    assert pair_contrast(one, other, other, SITE).eq(0).all()


@given(st.integers(0, 50))
def test_pair_distances_are_symmetric_a_metric_and_the_formula(seed):
    weights = [softmax_weights(3 * seed + n, shape=(1, 6)) for n in range(3)]
    a, b, c = (planted(one) for one in weights)
    found = pair_distance(a, b, SITE)
    assert_close(found.divergence, pair_distance(b, a, SITE).divergence)
    assert_close(found.change, -pair_distance(b, a, SITE).change)
    middle = (weights[0] + weights[1]) / 2
    expected = sum((one * (one / middle).log()).sum(0) for one in weights[:2]) / 2
    assert_close(found.divergence, expected, 1e-9)
    logs = [one.log() - one.log().mean(0) for one in weights]
    assert_close(found.change, logs[1] - logs[0])
    assert (
        found.distance <= pair_distance(a, c, SITE).distance + pair_distance(c, b, SITE).distance + 1e-12
    ).all()


def test_before_the_first_token_that_differs_nothing_differs():
    model, other = model_of(AttnRes()), TOKENS.clone()
    other[:, 3] = (other[:, 3] + 1) % 40
    found = pair_distance(record(model, TOKENS), record(model, other), "L2.mlp")
    assert found.divergence[:, :3].eq(0).all()
    assert found.change[:, :, :3].eq(0).all()
    assert (found.divergence[:, 3:] > 0).all()


def test_pairs_that_do_not_align_are_refused():
    model = model_of(AttnRes())
    trace = record(model, TOKENS)
    others = (
        record(model, TOKENS[:, :4]),
        record(model_of(AttnRes(sublayers_per_block=2)), TOKENS),
        replace(trace, positions=trace.positions + 1),
        replace(trace, mask=torch.tensor([[True] * 5, [False] + [True] * 4])),
    )
    for other in others:
        with pytest.raises(ConfigError, match="edit texts so that each token has its partner"):
            pair_distance(trace, other, "L1.mlp")

"""Invariant 2: with zero pseudo-queries every form computes what the standard model computes."""

from dataclasses import replace

import pytest
import torch
from closeness import distance
from torch.nn import functional as F

from attention_residuals.layers import OUTPUT
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    Delta,
    DenseFormer,
    Highway,
    HyperConnections,
    Inkling2,
    InputQuery,
    ManifoldHyperConnections,
    MultiHead,
    RawKeys,
    Sigmoid,
    SlidingWindow,
    StandardResidual,
    StaticMixing,
    ValueQuery,
)
from attention_residuals.models import Decoder, presets

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
CONFIG = presets.scaled(6, vocab_size=61, residual=StandardResidual())


def model_of(residual, dtype, weights, eps, scaled):
    model = Decoder(replace(CONFIG, residual=residual)).to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.startswith("residual.") for name in missing)
    for site in model.residual.sites():
        norm = model.norm if site == OUTPUT else getattr(model.layers[site.layer], site.kind).norm
        norm.eps = eps / model.residual.num_sources(site) ** 2 if scaled else eps
    return model


def logits_and_gradients(model):
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(3))
    logits = model(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    shared = {name: p.grad for name, p in model.named_parameters() if not name.startswith("residual.")}
    return {"logits": logits.detach(), **shared}


def largest_distance(residual, dtype, eps, scaled):
    weights = Decoder(CONFIG).to(dtype).state_dict()
    standard = logits_and_gradients(model_of(StandardResidual(), dtype, weights, eps, False))
    other = logits_and_gradients(model_of(residual, dtype, weights, eps, scaled))
    assert other.keys() == standard.keys()
    return max(distance(other[name], standard[name]) for name in standard)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5], ids=["eps is zero", "eps scaled by 1/n^2"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9, 12])
def test_zero_query_model_has_the_logits_and_gradients_of_the_standard_model(size, eps, dtype):
    assert largest_distance(AttnRes(sublayers_per_block=size), dtype, eps, scaled=True) <= TOLERANCE[dtype]


STARTS_AS_STANDARD = [
    AttnRes(),
    InputQuery(),
    InputQuery(sublayers_per_block=4),
    StaticMixing(),
    StaticMixing(normalised=False),
    Sigmoid(),
    Sigmoid(normalised=True, sublayers_per_block=4),
    RawKeys(),
    MultiHead(num_heads=3),
    ValueQuery(),
    Delta(),
    Delta(sublayers_per_block=4),
    DenseFormer(),
    DenseFormer(dilation=2, period=3),
    HyperConnections(),
    ManifoldHyperConnections(),
    Highway(),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("residual", STARTS_AS_STANDARD, ids=repr)
def test_a_fresh_model_of_these_rules_is_the_standard_model(residual, dtype):
    assert largest_distance(residual, dtype, 0.0, scaled=False) <= TOLERANCE[dtype]


@pytest.mark.parametrize("residual", [SlidingWindow(window=2), Inkling2(), Cumulative()], ids=repr)
def test_a_fresh_model_of_these_rules_is_another_model(residual):
    assert largest_distance(residual, torch.float64, 0.0, scaled=False) > 1e-3


def test_the_identity_is_only_approximate_with_an_unscaled_eps():
    block = largest_distance(AttnRes(sublayers_per_block=4), torch.float64, 1e-5, scaled=False)
    full = largest_distance(AttnRes(sublayers_per_block=1), torch.float64, 1e-5, scaled=False)
    assert 1e-4 < block < full < 1


def test_a_query_that_is_not_zero_changes_the_function():
    weights = Decoder(CONFIG).state_dict()
    model = model_of(AttnRes(sublayers_per_block=4), torch.float32, weights, 0.0, True)
    before = logits_and_gradients(model)["logits"]
    model.residual.readers["L3_mlp"].pseudo_query.data += 1.0
    assert distance(logits_and_gradients(model)["logits"], before) > 1e-4


def test_one_seed_gives_the_same_shared_weights_whatever_the_rule():
    models = []
    for residual in (StandardResidual(), *STARTS_AS_STANDARD):
        torch.manual_seed(7)
        models.append(Decoder(replace(CONFIG, residual=residual)).state_dict())
    for name, tensor in models[0].items():
        assert all(torch.equal(tensor, model[name]) for model in models[1:])

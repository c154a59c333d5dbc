"""Tuned lenses: plain before training, better after it on other texts, and for one model only."""

import json

import pytest
import torch
from closeness import assert_close
from torch.nn import functional as F

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, presets
from attention_residuals.trace.lenses import Looking, SourceLens, lens
from attention_residuals.trace.tuned_lens import TunedLens, tune_lens

TOKENS = torch.randint(40, (9, 4, 12), generator=torch.Generator().manual_seed(0))
BATCHES, HELD_OUT = list(TOKENS[:8]), TOKENS[8]


def model_of(seed=1):
    torch.manual_seed(seed)
    model = Decoder(presets.scaled(3, vocab_size=40, residual=AttnRes(sublayers_per_block=2)))
    for parameter in model.residual.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            parameter.data *= 10  # so that sublayers write as much as they would once trained
    return model


def tensors_of(reading):
    return [tensor.nan_to_num(nan=7.0) for tensor in reading[1:]]


@pytest.mark.parametrize(
    "target", ["state", "open block", "truncated output", SourceLens(source="B1")], ids=repr
)
def test_untrained_it_is_the_plain_lens(target):
    model = model_of()
    tuned = tune_lens(model, BATCHES, target=target, num_steps=0).read(model, HELD_OUT, num_top=3)
    plain = lens(model, HELD_OUT, target, num_top=3)
    assert tuned.sites == plain.sites
    for one, other in zip(tensors_of(tuned), tensors_of(plain), strict=True):
        assert torch.equal(one, other)


def test_training_brings_early_sites_nearer_on_other_texts():
    model = model_of()
    plain = lens(model, HELD_OUT).divergences.mean((1, 2))
    tuned = tune_lens(model, BATCHES, num_steps=60, learning_rate=1e-2)
    found = tuned.read(model, HELD_OUT).divergences.mean((1, 2))
    assert (found[:4] < 0.8 * plain[:4]).all()
    assert found[-1] < 1e-3  # the output read says what the model says, and goes on saying it


def test_what_falls_is_the_divergence_from_the_models_own_prediction():
    model = model_of().double()
    tuned = tune_lens(model, [HELD_OUT], num_steps=1, learning_rate=1e-3)
    look = Looking(model, "state")
    with torch.no_grad():
        final = model(HELD_OUT, tap=look).log_softmax(-1)
    for number, state in enumerate(look.states[:-1]):
        shift = torch.zeros(state.shape[-1], dtype=state.dtype, requires_grad=True)
        predicted = model.unembed(state + shift).log_softmax(-1)
        loss = F.kl_div(predicted, final, log_target=True, reduction="none").sum(-1).mean()
        (slope,) = torch.autograd.grad(loss, shift)
        # The first step of Adam, which is told of a slope by nothing but the slope.
        assert_close(tuned.biases[number], -1e-3 * slope / (slope.abs() + 1e-5))


def test_each_site_is_read_through_its_own_map():
    model = model_of()
    tuned = tune_lens(model, BATCHES, num_steps=4, learning_rate=1e-2)
    seen = []

    def unembed(state):
        seen.append(state)
        return type(model).unembed(model, state)

    model.unembed = unembed
    count = len(tuned.sites)
    lens(model, HELD_OUT)
    plain = seen[-count:]  # before them the model's own, where it calls unembed itself
    tuned.read(model, HELD_OUT)
    translated = seen[-count:]
    for number, (state, found) in enumerate(zip(plain, translated, strict=True)):
        expected = state + state @ tuned.matrices[number].T + tuned.biases[number]
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_seed_decides_the_order_of_the_batches():
    model = model_of()
    first, again, other = (tune_lens(model, BATCHES, num_steps=3, seed=seed).matrices for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_is_left_as_it_was():
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        assert tune_lens(model, BATCHES, num_steps=2).matrices.abs().max() > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("target", ["open block", SourceLens(source="B1")], ids=repr)
def test_a_saved_lens_comes_back_with_the_same_bits(tmp_path, target):
    model = model_of()
    tuned = tune_lens(model, BATCHES, target=target, num_steps=2)
    tuned.save(tmp_path / "lens")
    back = TunedLens.load(tmp_path / "lens", model)
    assert (back.target, back.sites, back.model) == (target, tuned.sites, tuned.model)
    assert torch.equal(back.matrices, tuned.matrices)
    assert torch.equal(back.biases, tuned.biases)
    mask = torch.ones_like(HELD_OUT, dtype=torch.bool)
    for one, other in zip(
        tensors_of(back.read(model, HELD_OUT, mask)), tensors_of(tuned.read(model, HELD_OUT)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)
    with pytest.raises(CheckpointError, match="holds a lens"):
        tuned.save(tmp_path / "lens")


def test_a_lens_is_for_one_model(tmp_path):
    model, other = model_of(), model_of(seed=2)
    tuned = tune_lens(model, BATCHES, num_steps=0)
    with pytest.raises(ConfigError, match="a model with the fingerprint"):
        tuned.read(other, HELD_OUT)
    tuned.save(tmp_path)
    with pytest.raises(CheckpointError, match="one for this model"):
        TunedLens.load(tmp_path, other)


def test_damaged_files_are_refused(tmp_path):
    model = model_of()
    tune_lens(model, BATCHES, num_steps=0).save(tmp_path)
    path = tmp_path / "lens.json"
    whole = json.loads(path.read_text())
    for change, message in (
        ({"width": 3}, "a matrix and a bias for each site"),
        ({"sites": None}, "a matrix and a bias for each site"),
        ({"target": 3}, "what a lens looks at"),
        ({"sha256": "0"}, "another checksum"),
        ({"format": 2}, "update attention-residuals"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(CheckpointError, match=message):
            TunedLens.load(tmp_path, model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="while writing"):
        tune_lens(model, BATCHES, num_steps=0).save(tmp_path / "file" / "lens")


def test_what_cannot_be_tuned_is_refused():
    model = model_of()
    for batches, options, message in (
        ([], {"num_steps": 1}, "no batches"),
        (BATCHES, {"num_steps": -1}, "0 or more"),
        (BATCHES, {"num_steps": 1, "learning_rate": 0.0}, "a number > 0"),
        (BATCHES, {"num_steps": 1, "target": "stat"}, "did you mean 'state'"),
    ):
        with pytest.raises(ConfigError, match=message):
            tune_lens(model, batches, **options)

"""Reads in two phases are the reads of one phase, in every way that a model can be run."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from torch import nn

from attention_residuals.errors import ConfigError
from attention_residuals.inference import KVCache
from attention_residuals.layers.residual import AttnRes, SlidingWindow, StandardResidual, TwoPhaseRule
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import Recorder

TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def model_of(size, dtype=torch.float64, **options):
    config = AttnRes(sublayers_per_block=size, **options)
    model = Decoder(presets.scaled(4, vocab_size=40, residual=config)).to(dtype)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model


@dtypes
@sizes
@pytest.mark.parametrize("partition", [None, 1, 2, 3, 7, 99])
def test_logits_and_weights_are_those_of_one_phase(size, partition, dtype):
    model = model_of(size, dtype)
    two, recorders = TwoPhaseRule(model.residual, partition), (Recorder(), Recorder())
    with torch.no_grad():
        one_logits = model(TOKENS, tap=recorders[0])
        two_logits = model(TOKENS, tap=recorders[1], residual=two)
        assert torch.equal(model(TOKENS, residual=two), two_logits)
    assert_close(two_logits, one_logits)
    for one, other in zip(recorders[0].trace(model).sites, recorders[1].trace(model).sites, strict=True):
        assert (one.source_names, one.writers) == (other.source_names, other.writers)
        assert_close(other.weights, one.weights)
        assert torch.equal(other.membership, one.membership)


@sizes
def test_gradients_of_every_parameter_are_those_of_one_phase(size):
    model = model_of(size)
    gradients = []
    for residual in (None, TwoPhaseRule(model.residual, 3)):
        model.zero_grad()
        model(TOKENS, residual=residual).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient)


@dtypes
@sizes
@pytest.mark.parametrize("chunk", [1, 7])
def test_cached_decoding_in_two_phases_is_one_full_pass(size, chunk, dtype):
    model = model_of(size, dtype)
    two, cache = TwoPhaseRule(model.residual), KVCache()
    with torch.no_grad():
        parts = [model(part, cache=cache, residual=two) for part in TOKENS.split(chunk, dim=1)]
        assert_close(torch.cat(parts, dim=1), model(TOKENS))


def test_the_inverse_norm_of_a_finished_block_is_computed_once():
    model = model_of(2)
    two = TwoPhaseRule(model.residual)
    norm, state = nn.Identity(), two.open(torch.randn(1, 2, model.config.width).double())
    known = []
    for site in two.sites()[:-1]:
        _, state = two.read(state, site, norm)
        known.append(state.phase_1[0].inverse_norms)
        state = two.write(state, site, torch.randn(1, 2, model.config.width).double())
    for earlier, later in zip(known, known[2:], strict=False):
        assert torch.equal(later[: len(earlier)], earlier)
    assert [len(norms) for norms in known] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_any_norm_and_any_edit_act_as_in_one_phase():
    class First:
        """Gives all weight of one site to its first source."""

        def begin(self, run):
            pass

        def read(self, read):
            weights = torch.zeros_like(read.weights)
            weights[0] = 1
            return read._replace(weights=weights) if str(read.site) == "L2.mlp" else read

        def write(self, write):
            return write

    model = model_of(3)
    two = TwoPhaseRule(model.residual)
    assert_close(model(TOKENS, tap=First(), residual=two), model(TOKENS, tap=First()))
    model.layers[1].mlp.norm = nn.LayerNorm(model.config.width).double()
    assert_close(model(TOKENS, residual=two), model(TOKENS))


def test_sources_in_bfloat16_read_the_same_to_their_precision():
    model = model_of(2, torch.float32, source_dtype="bfloat16")
    with torch.no_grad():
        assert_close(model(TOKENS, residual=TwoPhaseRule(model.residual)), model(TOKENS), 0.01)


@pytest.mark.parametrize("residual", [StandardResidual(), SlidingWindow()], ids=repr)
def test_a_rule_that_cannot_read_in_two_phases_is_refused(residual):
    model = Decoder(replace(presets.scaled(2, vocab_size=40), residual=residual))
    with pytest.raises(ConfigError, match="to read in two phases"):
        TwoPhaseRule(model.residual)
    with pytest.raises(ConfigError, match="partition=0"):
        TwoPhaseRule(model_of(1).residual, 0)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_the_backend_of_the_rule_is_kept(backend):
    model = model_of(2)
    model.residual.backend = backend
    assert TwoPhaseRule(model.residual).backend == backend

"""A converted model trains, evaluates, generates and is traced as our own decoder is."""

import pytest
import torch
from closeness import assert_close, distance
from layers.test_residual_rules import Looker
from models.hf.small_models import PRE_NORM, TOKENS, made, trained

from attention_residuals.errors import ConfigError, ConversionError, DataError, ShapeError
from attention_residuals.inference import Engine, Sampling, prefill
from attention_residuals.layers.residual import AttnRes, TwoPhaseRule
from attention_residuals.layers.tap import Chain
from attention_residuals.models import build
from attention_residuals.models.hf import ConvertedModel, convert
from attention_residuals.models.hf.install import depth_of
from attention_residuals.stats import mixing_matrix
from attention_residuals.trace import Recorder

BLOCK = AttnRes(sublayers_per_block=3)


def model_of(family, residual=BLOCK):
    return ConvertedModel(trained(convert(made(PRE_NORM[family]), residual)))


@torch.no_grad()
def run(model, tokens=TOKENS, **options):
    return model(tokens, **options)


@pytest.mark.parametrize("family", PRE_NORM)
def test_both_doors_give_the_same_logits(family):
    model = model_of(family)
    with torch.no_grad():
        expected = model.transformers(TOKENS).logits
    assert torch.equal(run(model), expected)
    assert_close(run(model, num_logits=2), expected[:, -2:])


@pytest.mark.parametrize("family", PRE_NORM)
def test_the_engine_generates_what_transformers_generates(family):
    model = model_of(family)
    prompts = [TOKENS[0].tolist(), TOKENS[1, :4].tolist()]
    found = Engine(model).generate(prompts, max_new_tokens=5, sampling=Sampling(temperature=0.0))
    for prompt, completion in zip(prompts, found, strict=True):
        ids = model.transformers.generate(
            torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert completion.tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "bloom", "kimi-linear"])
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_prefill_in_chunks_and_padding_change_nothing(family, chunk):
    model = model_of(family)
    expected = run(model)[:, -1]
    assert_close(prefill(model, TOKENS, chunk=chunk).logits, expected)
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, :3] = False
    padded = prefill(model, TOKENS, mask=mask, chunk=chunk).logits
    assert_close(padded[1:], run(model, TOKENS[1:, 3:])[:, -1])


def test_two_phases_give_what_one_gives():
    model = model_of("llama")
    assert_close(run(model, residual=TwoPhaseRule(model.residual)), run(model))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3", "kimi-linear"])
def test_a_mask_of_pairs_keeps_documents_apart(family):
    model = model_of(family)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2)
    together = run(model, mask=documents[:, :, None] == documents[:, None, :])
    assert_close(together[:, 3:], run(model, TOKENS[:, 3:]), 2e-5)


@pytest.mark.parametrize("family", PRE_NORM)
def test_a_trace_holds_every_read_and_tells_who_wrote_it(family):
    model, looker, recorder = model_of(family), Looker(), Recorder()
    recorded = run(model, tap=Chain(looker, recorder))
    assert torch.equal(recorded, run(model))
    trace, outputs = recorder.trace(model), torch.stack([write.output for write in looker.writes])
    assert [site.name for site in trace.sites] == [str(site) for site in model.residual.sites()]
    for row, read in zip(mixing_matrix(trace).weights, looker.reads, strict=True):
        state = (read.weights[..., None] * torch.stack(read.values)).sum(0)
        assert_close(torch.einsum("wbt,wbtd->btd", row, outputs), state)


def test_a_tap_that_changes_a_read_changes_the_result_and_leaves_nothing_behind():
    model = model_of("llama")
    before = run(model)

    class Even:
        def begin(self, run):
            pass

        def read(self, read):
            return read._replace(weights=torch.full_like(read.weights, 1 / len(read.weights)))

        def write(self, write):
            return write

    class Broken(Even):
        def read(self, read):
            raise KeyError(read.site)

    assert distance(run(model, tap=Even()), before) > 1e-3
    with pytest.raises(KeyError):
        run(model, tap=Broken())
    assert torch.equal(run(model), before)


def test_checkpointed_activations_change_no_gradient():
    model = model_of("gpt2")
    model(TOKENS).logsumexp(-1).sum().backward()
    expected = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    other = ConvertedModel(model.transformers, checkpoint_activations=True)
    other(TOKENS).logsumexp(-1).sum().backward()
    assert all(torch.equal(dict(other.named_parameters())[name].grad, expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="a tap on a pass"):
        other(TOKENS, tap=Recorder())


def test_it_runs_without_dropout_in_any_mode():
    model = model_of("gpt2").train()
    assert model.transformers.config.resid_pdrop > 0
    assert torch.equal(run(model), run(model))


def test_a_new_model_of_the_config_takes_the_weights():
    model = model_of("gemma")
    other = build(model.config)
    assert distance(run(other), run(model)) > 1e-3
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other), run(model))
    assert other.transformers.lm_head.weight is other.transformers.model.embed_tokens.weight
    assert model.state_dict().keys() <= model.transformers.state_dict().keys()
    assert "attention_residuals.readers.L0_mlp.pseudo_query" in model.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


class KeysOnly:
    """A cache without states, such as that of a sharded prefill."""

    num_tokens = 0

    def extend(self, layer, key, value):
        return key, value

    def advance(self, num_tokens):
        pass


def test_what_a_model_cannot_do_is_told():
    kimi, bloom, gemma = (model_of(family) for family in ("kimi-linear", "bloom", "gemma3"))
    pairs = torch.ones(2, 9, 9, dtype=torch.bool)
    with pytest.raises(ConfigError, match="a KeysOnly for layers of full_attention, linear_attention"):
        run(kimi, cache=KeysOnly())
    for model in (gemma, bloom):
        with pytest.raises(ConfigError, match="a mask of pairs"):
            run(model, mask=pairs)
    with pytest.raises(DataError, match="token ids"):
        run(gemma, TOKENS + 60)
    with pytest.raises(ShapeError, match="a sequence of 90 tokens"):
        run(gemma, TOKENS.repeat(1, 10))
    with pytest.raises(ConversionError, match="not converted"):
        ConvertedModel(made(PRE_NORM["llama"]))
    with pytest.raises(ConversionError, match="not converted"):
        depth_of(made(PRE_NORM["llama"]))

"""A pretrained model converts without loss, or not at all."""

import copy
import json

import pytest
import torch
from closeness import assert_close, distance
from models.hf.small_models import OTHERS, PRE_NORM, TOKENS, made, trained
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from attention_residuals.errors import CheckpointError, ConfigError, ConversionError
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
from attention_residuals.layers.tap import Pass, Read
from attention_residuals.models import load_model
from attention_residuals.models.hf import convert, save_converted
from attention_residuals.models.hf.install import depth_of, is_converted
from attention_residuals.ops import reference

BLOCK = AttnRes(sublayers_per_block=3)
every_family = pytest.mark.parametrize("family", PRE_NORM)


def run(model):
    with torch.no_grad():
        return model(TOKENS).logits


def gradients(model):
    logits = model(TOKENS).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@every_family
@pytest.mark.parametrize("residual", [BLOCK, AttnRes()], ids=["block", "full"])
def test_logits_gradients_and_text_are_those_of_the_original(family, residual):
    original, model = made(PRE_NORM[family]), convert(made(PRE_NORM[family]), residual)
    assert_close(run(model), run(original))
    expected, actual = gradients(original), gradients(model)
    assert expected.keys() == {name for name in actual if not name.startswith("attention_residuals.")}
    assert max(distance(actual[name], expected[name]) for name in expected) < 1e-4
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), original.generate(TOKENS, **options))


@every_family
def test_around_the_standard_rule_a_model_is_its_own_self_bit_for_bit(family):
    model = made(PRE_NORM[family])
    before = run(model)
    found = run(convert(model, StandardResidual()))
    if family == "kimi-linear":  # its linear attention is computed in another way
        assert_close(found, before)
    else:
        assert torch.equal(found, before)


@pytest.mark.parametrize("family", OTHERS)
def test_what_cannot_convert_is_refused_and_left_as_it_was(family):
    config, message = OTHERS[family]
    model = made(config)
    classes, attributes = [type(module) for module in model.modules()], [*model.__dict__]
    logits = run(model)
    with pytest.raises(ConversionError, match=message):
        convert(model, BLOCK)
    assert classes == [type(module) for module in model.modules()]
    assert attributes == [*model.__dict__]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(run(model), logits)


class NormOfNothing(nn.Module):
    """Has the look of a norm, and hands on what it reads."""

    eps = 1e-6

    def forward(self, hidden):
        return hidden


def test_a_reader_that_does_not_norm_is_found_by_the_proof():
    model = made(PRE_NORM["llama"])
    model.model.layers[2].post_attention_layernorm = NormOfNothing()
    eps, logits = model.model.norm.variance_epsilon, run(model)
    with pytest.raises(ConversionError, match="logits that AttnRes changes by"):
        convert(model, BLOCK)
    assert torch.equal(run(model), logits)
    assert not is_converted(model)
    assert model.model.norm.variance_epsilon == eps
    assert "save_pretrained" not in type(model).__dict__


def test_without_the_change_of_eps_the_proof_fails(monkeypatch):
    monkeypatch.setattr(
        "attention_residuals.models.hf.conversion.read_scales", lambda rule: [1.0] * len(rule.sites())
    )
    with pytest.raises(ConversionError, match="logits that AttnRes changes by"):
        convert(made(PRE_NORM["llama"]), BLOCK)


def test_each_reader_gets_eps_over_the_square_of_its_sources():
    model = convert(made(PRE_NORM["llama"]), BLOCK)
    sites, rule = depth_of(model).rule.sites(), model.attention_residuals
    norms = [
        *(
            norm
            for layer in model.model.layers
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ),
        model.model.norm,
    ]
    expected = [1e-6 / rule.num_sources(site) ** 2 for site in sites]
    assert [norm.variance_epsilon for norm in norms] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "residual",
    [
        StandardResidual(),
        StaticMixing(),
        StaticMixing(normalised=False),
        Sigmoid(),
        RawKeys(),
        MultiHead(num_heads=4),
        InputQuery(),
        Delta(sublayers_per_block=4),
        DenseFormer(),
        HyperConnections(),
        ManifoldHyperConnections(),
        Highway(),
    ],
    ids=repr,
)
def test_every_rule_that_starts_as_the_standard_one_converts(residual):
    original = made(PRE_NORM["llama"])
    original.config.rms_norm_eps = 1e-3
    for module in original.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3  # large, so that a wrong scale of eps is seen
    before = run(original)
    assert_close(run(convert(original, residual)), before)


@pytest.mark.parametrize("residual", [SlidingWindow(window=2), Cumulative()], ids=repr)
def test_a_rule_that_starts_otherwise_is_refused(residual):
    with pytest.raises(ConversionError, match=f"logits that {type(residual).__name__} changes"):
        convert(made(PRE_NORM["llama"]), residual)


@pytest.mark.parametrize("residual", [ValueQuery(), Inkling2()], ids=repr)
def test_a_rule_that_reads_several_times_is_refused(residual):
    model = made(PRE_NORM["llama"])
    with pytest.raises(ConfigError, match=r"reads \d times at"):
        convert(model, residual)
    assert not is_converted(model)


def test_nothing_is_converted_twice():
    with pytest.raises(ConversionError, match="converted already"):
        convert(convert(made(PRE_NORM["llama"]), BLOCK), BLOCK)


def test_a_trained_model_is_the_paper_written_out_around_its_sublayers():
    model = trained(convert(made(PRE_NORM["llama"]).double(), BLOCK))
    assert_close(run(model), written_out(model, BLOCK.sublayers_per_block))


@torch.no_grad()
def written_out(model, size):
    """The schedule in the plainest words, around the layers' own modules."""
    readers = list(model.attention_residuals.readers.values())
    hidden = model.model.embed_tokens(TOKENS)
    positions = torch.arange(TOKENS.shape[1])[None]
    rotation = model.model.rotary_emb(hidden, position_ids=positions)
    blocks, inside, site = [hidden], [], 0

    def read():
        nonlocal site
        sources = torch.stack([*blocks, *([sum(inside)] if inside else [])])
        reader, site = readers[site], site + 1
        return reference.depth_attention(sources, reader.pseudo_query, reader.key_gain, eps=1e-6).mix

    def write(output):
        inside.append(output)
        if len(inside) == size:
            blocks.append(sum(inside))
            inside.clear()

    for layer in model.model.layers:
        write(
            layer.self_attn(
                layer.input_layernorm(read()),
                position_embeddings=rotation,
                attention_mask=None,
            )[0]
        )
        write(layer.mlp(layer.post_attention_layernorm(read())))
    return model.lm_head(model.model.norm(read()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_keeps_its_dtype_and_its_numbers(dtype):
    model = made(PRE_NORM["gemma"]).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert(model, BLOCK)
    after = model.state_dict()
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_copy_has_a_rule_of_its_own():
    model = convert(made(PRE_NORM["llama"]), BLOCK)
    before, other = run(model), trained(copy.deepcopy(model))
    assert torch.equal(run(model), before)
    assert distance(run(other), before) > 1e-3


def test_hidden_states_are_what_attention_reads_and_the_last_norm_gives():
    model = trained(convert(made(PRE_NORM["llama"]), BLOCK))
    reads = {}

    class Watch:
        def begin(self, run: Pass) -> None:
            pass

        def read(self, read: Read) -> Read:
            reads[str(read.site)] = (read.weights[..., None] * torch.stack(read.values)).sum(0)
            return read

        def write(self, write):
            return write

    with torch.no_grad(), depth_of(model).running(None, Watch()):
        states = model(TOKENS, output_hidden_states=True).hidden_states
    assert len(states) == 5
    for layer, state in enumerate(states[:-1]):
        assert_close(state, reads[f"L{layer}.attention"])
    assert_close(model.lm_head(states[-1]), run(model))
    with torch.no_grad():
        as_tuple = model(TOKENS, output_hidden_states=True, return_dict=False)
    assert_close(as_tuple[-1][2], states[2])


def test_gradient_checkpointing_changes_no_gradient():
    model = trained(convert(made(PRE_NORM["llama"]), BLOCK)).train()
    expected = gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable()
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@every_family
def test_saved_and_loaded_by_either_door_a_model_has_the_same_bits(family, tmp_path):
    model = trained(convert(made(PRE_NORM[family]), BLOCK))
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected, actual = model.state_dict(), loaded.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert_close(run(loaded), run(model), 1e-6)
    assert_close(load_model(tmp_path / "model")(TOKENS), run(model), 1e-6)
    assert loaded.generation_config.max_new_tokens == 7


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = convert(made(PRE_NORM["gemma"]), BLOCK)
    save_converted(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight.dtype == torch.float64
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as stored:
        names = [name for name in stored.keys() if "lm_head" in name or "embed_tokens" in name]  # noqa: SIM118
    assert names == ["model.embed_tokens.weight"]


def test_no_loader_can_take_a_converted_model_for_an_ordinary_one(tmp_path):
    save_converted(convert(made(PRE_NORM["llama"]), BLOCK), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "attention_residuals_converted"
    assert "architectures" not in config


def damaged(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["model"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda model: model["residual"].update(type="AttnRez"), CheckpointError, "'AttnRez'"),
        (lambda model: model["eps"].pop(), CheckpointError, "eps="),
        (lambda model: model.update(transformers="[]"), CheckpointError, "transformers="),
        (lambda model: model.update(transformers='{"model_type": "lama"}'), ConfigError, "lama"),
        (
            lambda model: model["norms"].__setitem__(0, "model.layers.0.norm"),
            ConversionError,
            r"layers\.0\.norm",
        ),
        (lambda model: model.update(norms=None), CheckpointError, "norms=None"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, change, error, message):
    save_converted(convert(made(PRE_NORM["llama"]), BLOCK), tmp_path / "model")
    damaged(tmp_path / "model", change)
    with pytest.raises(error, match=message):
        load_model(tmp_path / "model")


def test_impossible_requests_at_saving_and_loading_are_refused(tmp_path):
    model = convert(made(PRE_NORM["llama"]), BLOCK)
    with pytest.raises(ConfigError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "model", push_to_hub=True)
    model.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")  # as models of Transformers do, over what it wrote before
    with pytest.raises(CheckpointError, match="exists"):
        save_converted(model, tmp_path / "model")
    made(PRE_NORM["llama"]).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="exists"):
        model.save_pretrained(tmp_path / "other")  # not over another model
    with pytest.raises(ConfigError, match="safe_serialization=False"):
        model.save_pretrained(tmp_path / "model", safe_serialization=False)
    short = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="bfloat16", local_files_only=True)
    assert short.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="quantization_config for a converted model"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=object())
    with pytest.raises(ConversionError, match="not converted"):
        depth_of(made(PRE_NORM["llama"]))

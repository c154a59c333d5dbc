import json
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from models.hf.wrapped_models import PROMPTS, SHAPE, VOCAB, all_rules, both_heads, model_of, some_tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.models.hf.causal_lm import AttnResForCausalLM
from attention_residuals.models.hf.configuration import AttnResConfig

# The config


def test_the_config_keeps_the_decoders_config_once_and_shows_transformers_names():
    config = AttnResConfig.of(SHAPE, eos_token_id=3)
    assert config.decoder_config == SHAPE
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (60, 32, SHAPE.mlp_width)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 1, 1)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (32, 40, True)
    assert "hidden_size" not in config.to_dict()
    assert config.to_dict()["model"]["width"] == 32
    assert config.eos_token_id == 3


@all_rules
def test_a_config_comes_back_from_its_file(tmp_path, residual):
    config = AttnResConfig.of(replace(SHAPE, residual=residual), pad_token_id=1)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, AttnResConfig)
    assert loaded.decoder_config == config.decoder_config
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()


def test_an_unknown_rule_is_named(tmp_path):
    config = AttnResConfig.of(SHAPE)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"AttnRes"', '"AttnRez"'))
    with pytest.raises(ConfigError, match=r"'AttnRez'(.|\n)*did you mean 'AttnRes'"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_config_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="DecoderConfig"):
        AttnResConfig(model={"type": "AttnRes"})


def test_sizes_are_told_in_our_words():
    with pytest.raises(ConfigError, match=r"got: hidden_size=64(.|\n)*DecoderConfig\(width="):
        AttnResConfig(hidden_size=64)
    with pytest.raises(AttributeError, match="hidden_size"):
        AttnResConfig().hidden_size = 64


def test_the_default_config_makes_a_model():
    assert AttnResForCausalLM(AttnResConfig()).decoder.config == AttnResConfig().decoder_config


# Files


@all_rules
@both_heads
def test_a_saved_model_comes_back_with_the_same_bits(tmp_path, residual, tied):
    model, tokens = model_of(residual, tied=tied), some_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, AttnResForCausalLM)
    assert not loaded.training
    assert loaded.decoder.config == model.decoder.config
    expected = model.decoder.state_dict(keep_vars=True)
    found = loaded.decoder.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    assert ("head.weight" in found) == (not tied)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert found[name].requires_grad == tensor.requires_grad
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_model_of_another_dtype_comes_back_in_it(tmp_path):
    model = model_of(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AttnResForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert AttnResForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_model_in_several_files_comes_back(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = AttnResForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded(torch.tensor([PROMPTS[0]])).logits, model(torch.tensor([PROMPTS[0]])).logits)


def edited(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("decoder.layers.1.mlp.up.weight"), "missing(.|\n)*layers.1.mlp.up"),
        (lambda tensors: tensors.pop("decoder.residual.readers.output.key_gain"), "missing(.|\n)*key_gain"),
        (lambda tensors: tensors.update(other=torch.zeros(2)), "1 unexpected keys, the first is other"),
        (
            lambda tensors: tensors.update({"decoder.norm.gain": torch.zeros(2)}),
            r"mismatched(.|\n)*norm\.gain",
        ),
    ],
    ids=["missing", "missing reader", "left over", "other shape"],
)
def test_tensors_that_do_not_fit_are_an_error(tmp_path, edit, message):
    model_of().save_pretrained(tmp_path)
    edited(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_a_config_that_does_not_fit_the_weights_is_an_error(tmp_path):
    model_of().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    data["model"]["residual"] = {"type": "StandardResidual"}
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="unexpected"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


# Embeddings


@both_heads
@pytest.mark.parametrize("size", [70, 50])
def test_the_vocabulary_can_be_resized(tmp_path, tied, size):
    model, tokens = model_of(tied=tied), torch.randint(1, 50, (2, 9))
    before = model(tokens).logits
    embedding = model.resize_token_embeddings(size)
    assert embedding is model.get_input_embeddings() is model.decoder.embedding
    assert model.config.vocab_size == model.decoder.config.vocab_size == embedding.num_embeddings == size
    after = model(tokens).logits
    assert after.shape[-1] == size
    assert_close(after[..., :50], before[..., :50])
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, after)


def test_new_rows_are_drawn_like_the_first_ones():
    model = model_of()
    model.resize_token_embeddings(1060, mean_resizing=False)
    assert 0.015 < model.decoder.embedding.weight[60:].std().item() < 0.025
    assert model.resize_token_embeddings().num_embeddings == 1060


def test_embeddings_can_be_replaced():
    model, tokens = model_of(tied=False), some_tokens()
    assert model.get_output_embeddings() is model.decoder.head
    embedding, head = torch.nn.Embedding(VOCAB, SHAPE.width), torch.nn.Linear(SHAPE.width, VOCAB, bias=False)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    assert model.decoder.embedding is embedding
    assert torch.equal(model(tokens).logits, model.decoder(tokens))
    assert model.decoder.head is head


def test_a_tied_model_has_no_head_to_replace():
    model = model_of()
    assert model.get_output_embeddings() is None
    with pytest.raises(ConfigError, match="tied"):
        model.set_output_embeddings(torch.nn.Linear(SHAPE.width, VOCAB, bias=False))

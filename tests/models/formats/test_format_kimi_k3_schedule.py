"""Kimi K3's schedule, written out from its description, and the usual misreadings of it."""

import pytest
import torch
from closeness import assert_close, distance
from models.formats.kimi_models import EPS, random_model
from models.hf.small_models import TOKENS
from safetensors.torch import load_file

from attention_residuals import record
from attention_residuals.models.formats import load_kimi_k3, save_kimi_k3


@torch.no_grad()
def written_out(model, tensors, block, misread=""):
    """The schedule of the format in plain words, around the layers' own modules.

    ``misread`` is one of the mistakes that others have made.
    """

    def mix(sources, stem, misread=misread):
        stacked = torch.stack(sources)
        keys = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + EPS)
        values = keys if misread == "mix normalised values" else stacked
        if misread == "no norm in the score":
            keys = stacked
        direction = tensors[f"{stem}_norm.weight"] * tensors[f"{stem}_proj.weight"][0]
        return torch.einsum("sbt,sbtd->btd", (keys @ direction).softmax(0), values)

    own = model.transformers.model
    prefix, bank = own.embed_tokens(TOKENS), []
    attention_mask = torch.full((9, 9), -torch.inf, dtype=prefix.dtype).triu(1)[None, None]
    for i, layer in enumerate(own.layers):
        stem = f"model.layers.{i}"
        closes = i % block == 0
        if misread == "attention reads the new bank" and closes and i:
            h = mix([*bank, prefix, prefix], f"{stem}.self_attention_res")
        else:
            h = mix([*bank, prefix], f"{stem}.self_attention_res") if bank else prefix
        if closes and misread != "snapshot after attention":
            bank, prefix = [*bank, h if misread == "snapshot the mix" else prefix], None
        mask = {"attention_mask": attention_mask} if own.config.layer_types[i] == "full_attention" else {}
        output = layer.self_attn(layer.input_layernorm(h), **mask)
        output = output[0] if isinstance(output, tuple) else output
        prefix = output if prefix is None else prefix + output
        if closes and misread == "snapshot after attention":
            bank, prefix = [*bank, prefix], torch.zeros_like(prefix)
        h = mix([*bank, prefix], f"{stem}.mlp_res")
        if misread == "skip the MLP's read of layer 0" and i == 0:
            h = prefix
        prefix = prefix + layer.mlp(layer.post_attention_layernorm(h))
    last = "model.layers.6.mlp_res" if misread == "output by a layer's weights" else "model.output_attn_res"
    h = prefix if misread == "skip the output read" else mix([*bank, prefix], last)
    return model.transformers.lm_head(own.norm(h))


MISREADS = (
    "attention reads the new bank",
    "snapshot the mix",
    "snapshot after attention",
    "skip the MLP's read of layer 0",
    "mix normalised values",
    "no norm in the score",
    "skip the output read",
    "output by a layer's weights",
)


def stored(block, tmp_path):
    """A model and its tensors as stored."""
    save_kimi_k3(random_model(block), tmp_path / "model")
    model = load_kimi_k3(tmp_path / "model")
    return model, load_file(tmp_path / "model" / "model.safetensors")


@pytest.mark.parametrize("block", [1, 2, 3, 4, 6, 7])
def test_our_schedule_is_theirs_written_out(tmp_path, block):
    model, tensors = stored(block, tmp_path)
    assert_close(model(TOKENS), written_out(model, tensors, block))


@pytest.mark.parametrize("block", [2, 3])
def test_every_usual_misreading_of_the_schedule_is_seen(tmp_path, block):
    model, tensors = stored(block, tmp_path)
    expected = model(TOKENS)
    weights = torch.cat([site.weights.flatten() for site in record(model, TOKENS).sites[1:]])
    assert weights.max() < 0.99
    assert min(distance(written_out(model, tensors, block, misread), expected) for misread in MISREADS) > 1e-3

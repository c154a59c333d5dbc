"""Small Kimi Linear models around a residual rule, with weights at which everything in them matters."""

import json
from dataclasses import replace

import torch

from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import build, presets

TOKENS = torch.randint(1, 90, (2, 41), generator=torch.Generator().manual_seed(4))


def sizes(width):
    """All sizes of a model with two heads, in the words of Transformers."""
    return {
        "hidden_size": width,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_heads": 2,
        "linear_head_dim": width // 2,
        "kv_lora_rank": width // 2,
        "qk_nope_head_dim": width // 2,
        "qk_rope_head_dim": width // 4,
        "v_head_dim": width // 2,
        "intermediate_size": width * 3 // 2,
        "moe_intermediate_size": width // 2,
    }


def small(residual=None, **changes):
    """The tiny preset, narrower."""
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=90, residual=residual)
    fields = json.dumps({**config.original, **sizes(32), **changes})
    return replace(config, transformers=fields, width=32)


def smallest(num_layers, residual, vocab_size):
    """Every second layer, and the last, is MLA; every layer but the first has experts."""
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=vocab_size, residual=AttnRes())
    kinds = ["full_attention" if layer % 2 else "linear_attention" for layer in range(num_layers)]
    fields = {
        **config.original,
        **sizes(16),
        "num_local_experts": 4,
        "num_hidden_layers": num_layers,
        "layer_types": [*kinds[:-1], "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * (num_layers - 1)],
    }
    return replace(
        config,
        transformers=json.dumps(fields),
        width=16,
        residual=residual,
        norms=(*config.norms[: 2 * num_layers], config.norms[-1]),
        eps=config.eps[: 2 * num_layers + 1],
    )


def made(residual=None, *, trained=True, **changes):
    torch.manual_seed(0)
    model = build(small(residual, **changes))
    for name, parameter in model.named_parameters():
        if "dt_bias" in name or "A_log" in name:
            torch.nn.init.uniform_(parameter, -2, 0)  # decays that matter within a short text
        elif parameter.ndim > 1:
            parameter.data *= 2
    for parameter in model.residual.parameters() if trained else ():
        parameter.data += torch.randn_like(parameter) / 2
    return model


@torch.no_grad()
def run(model, tokens=TOKENS, **options):
    return model(tokens, **options)

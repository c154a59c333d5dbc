"""A small Kimi Linear model around a residual rule, with weights at which everything in it matters."""

import json
from dataclasses import replace

import torch

from attention_residuals.models import build, presets

TOKENS = torch.randint(1, 90, (2, 41), generator=torch.Generator().manual_seed(4))
SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
}


def small(residual=None, **changes):
    """The tiny preset, narrower."""
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=90, residual=residual)
    fields = json.dumps({**config.original, **SMALL, **changes})
    return replace(config, transformers=fields, width=32)


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

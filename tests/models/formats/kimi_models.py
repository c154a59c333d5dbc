"""A small random model in Kimi K3's layout, for the tests of the format."""

import torch
import transformers
from models.hf.small_models import LATENT, SIZES, trained
from torch import nn

from attention_residuals import AttnRes
from attention_residuals.layers.residual import StandardResidual
from attention_residuals.models.hf import ConvertedModel
from attention_residuals.models.hf.conversion import original_config
from attention_residuals.models.hf.install import install

NUM_LAYERS, BLOCK, EPS = 7, 3, 1e-5
SHAPE = {
    **SIZES,
    **LATENT,
    "num_hidden_layers": NUM_LAYERS,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "rms_norm_eps": EPS,
    "layer_types": [
        "full_attention" if layer in (2, 6) else "linear_attention" for layer in range(NUM_LAYERS)
    ],
}


def random_model(block=BLOCK, dtype=torch.float32, **changes):
    """A KimiLinear that has learned to read over depth, all of its numbers drawn at random."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.KimiLinearConfig(**{**SHAPE, **changes})
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        nn.init.normal_(tensor, mean=float("norm" in name), std=0.2)
    residual = StandardResidual()
    if block is not None:
        residual = AttnRes(sublayers_per_block=2 * min(block, NUM_LAYERS), key_eps=EPS)
    install(model, original_config(model, residual))
    model = ConvertedModel(trained(model))
    for name, parameter in model.residual.named_parameters():
        if "query" in name:
            parameter.data.mul_(0.2)  # a saturated softmax would hide mistakes
    return model.to(dtype)

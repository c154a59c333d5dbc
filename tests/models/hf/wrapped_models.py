"""Decoders of ours as Transformers models, small and away from their start."""

from dataclasses import replace

import huggingface_hub
import pytest
import torch
import transformers

from attention_residuals.layers.residual import RULES, AttnRes, HyperConnections, StandardResidual
from attention_residuals.models import Decoder, presets
from attention_residuals.models.hf.causal_lm import AttnResForCausalLM

VOCAB = 60
SHAPE = presets.scaled(3, vocab_size=VOCAB, max_tokens=40)
SOME_RULES = {
    "standard": StandardResidual(),
    "block": AttnRes(sublayers_per_block=2),
    "full": AttnRes(sublayers_per_block=1),
    "hc": HyperConnections(streams=2),
}
PROMPTS = [[7, 8, 9, 10, 11, 12], [13, 14], [15, 16, 17, 18]]
GREEDY = {"do_sample": False, "max_new_tokens": 8}

huggingface_hub.constants.HF_HUB_OFFLINE = True
transformers.utils.logging.disable_progress_bar()
some_rules = pytest.mark.parametrize("residual", SOME_RULES.values(), ids=SOME_RULES.keys())
all_rules = pytest.mark.parametrize("residual", [rule() for rule in RULES.values()], ids=RULES.keys())
both_heads = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def decoder_of(residual=SOME_RULES["block"], *, tied=True, dtype=torch.float32):
    """A decoder whose every trainable weight is away from its start, so that reads and tokens differ."""
    decoder = Decoder(replace(SHAPE, residual=residual, tied=tied)).eval()
    for parameter in decoder.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return decoder.to(dtype)


def model_of(*args, **kwargs):
    return AttnResForCausalLM.from_decoder(decoder_of(*args, **kwargs), pad_token_id=0).eval()


def some_tokens(batch=2, length=9):
    return torch.randint(1, VOCAB, (batch, length))


def left_padded(prompts):
    length = max(map(len, prompts))
    tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": tokens, "attention_mask": mask}

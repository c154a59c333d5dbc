"""A tiny model with random weights, in a folder and in a session, for tests of the server and of the live page."""

import torch

from attention_residuals.data import Tokenizer
from attention_residuals.inference import Engine
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, DecoderConfig, save_model
from attention_residuals.page.session import Session

MAX_TOKENS = 64


def tiny(max_tokens=MAX_TOKENS, num_layers=3):
    tokenizer = Tokenizer.train(["the cat sat on the mat; the dog ate the cat " * 9], vocab_size=280)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, num_layers=num_layers, width=16, num_heads=2, num_kv_heads=2, head_width=8,
        mlp_width=24, max_tokens=max_tokens, residual=AttnRes(sublayers_per_block=2),
    )  # fmt: skip
    torch.manual_seed(5)
    model = Decoder(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "query" in name:
            parameter += torch.randn_like(parameter) / 3
        elif parameter.ndim == 2:
            parameter.copy_(torch.randn_like(parameter) / 3)
    return model, tokenizer


def session():
    return Session(Engine(*tiny()), "tiny")


def folder_of_a_model(folder, **options):
    model, tokenizer = tiny(**options)
    save_model(model, folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder

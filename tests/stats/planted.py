"""Traces of routing that is given, and small models whose routing is random."""

from dataclasses import replace

import torch
from layers.test_residual_rules import Looker

from attention_residuals.data import Tokenizer
from attention_residuals.layers.residual import AttnRes
from attention_residuals.layers.tap import OUTPUT, Chain, Pass, Read, Write
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import Recorder

MODEL = Decoder(presets.scaled(2, vocab_size=40, residual=AttnRes()))
WIDTH = 8
TEXTS = ["low lower", "lowest", "never <b>&amp;</b>"]
TOKENIZER = Tokenizer.train(TEXTS * 9, vocab_size=265)
TOKENS = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))


def model_of(config, vocab_size=40, dtype=torch.float64):
    """A model of 3 layers whose rule has learned something at random."""
    shape = presets.scaled(3, vocab_size=vocab_size, residual=config)
    model = Decoder(replace(shape, width=30)).to(dtype)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model


def looked_at(config, keep="values"):
    """A model, the trace of a pass, and the reads and writes of that pass."""
    model, looker, recorder = model_of(config), Looker(), Recorder(keep)
    with torch.no_grad():
        model(TOKENS, tap=Chain(looker, recorder))
    return model, recorder.trace(model), looker


def parts_of(read):
    """What each source adds to the state, straight from a read."""
    weights = read.weights if read.weights.ndim == 4 else read.weights[..., None]
    values = torch.stack(read.values).unflatten(-1, (weights.shape[-1], -1))
    return (weights[..., None] * values).flatten(-2)


def one_hot(source, count, shape=(1, 3)):
    weights = torch.zeros(count, *shape, dtype=torch.float64)
    weights[source] = 1.0
    return weights


def uniform(count, shape=(1, 3)):
    return torch.full((count, *shape), 1 / count, dtype=torch.float64)


def planted(weights, *, values=None, membership=None, outputs=None, names=None, tokens=None, mask=None):
    """The trace of one read at the output with these weights; every writer is a source of its own by default."""
    count, *shape = weights.shape
    generator = torch.Generator().manual_seed(3)
    membership = torch.eye(count) if membership is None else membership
    num_writers = membership.shape[1]
    if outputs is None:
        outputs = torch.randn(num_writers, *shape[:2], WIDTH, generator=generator, dtype=torch.float64)
    if values is None:
        pattern = "sw,wbtd->sbtd" if membership.ndim == 2 else "swbt,wbtd->sbtd"
        values = torch.einsum(pattern, membership.double(), outputs)
    writers = ("embedding", *(f"L{n // 2}.{('attention', 'mlp')[n % 2]}" for n in range(num_writers - 1)))
    tokens = torch.arange(shape[0] * shape[1]).view(shape[:2]) if tokens is None else tokens
    recorder = Recorder("values")
    recorder.begin(Pass(tokens, torch.arange(shape[1]).expand(*shape[:2]), mask))
    for writer, output in zip(writers, outputs, strict=True):
        recorder.write(Write(writer, output))
    sources = tuple(values.unbind(0))
    recorder.read(
        Read(
            site=OUTPUT,
            part="in",
            source_names=names or writers[:count],
            sources=sources,
            values=sources,
            logits=weights.log(),
            weights=weights,
            inverse_norms=None,
            writers=writers,
            membership=membership,
        )
    )
    return recorder.trace(MODEL)

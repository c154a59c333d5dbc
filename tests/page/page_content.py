"""Passes of small models, and what a page carries of them, decoded another way than the page does."""

import base64
import zlib
from dataclasses import replace

import numpy as np
import torch

from attention_residuals import AttnRes, Decoder, page, presets, record
from attention_residuals.trace import Drop, Recorder, every_edge, intervene, lens, sweep

WORDS = tuple(f"w{number}" for number in range(60))


class Words:
    """Names ids as a tokenizer does."""

    def tokens(self, ids):
        return [WORDS[int(number)] for number in ids]


def model_of(residual=None, depth=4, max_tokens=1024):
    torch.manual_seed(1)
    residual = AttnRes(sublayers_per_block=2) if residual is None else residual
    model = Decoder(
        presets.scaled(depth, vocab_size=len(WORDS), max_tokens=max_tokens, residual=residual)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name:
                parameter.normal_(std=0.4)
    return model


def tokens_of(length, rows=1, seed=0):
    return torch.randint(len(WORDS), (rows, length), generator=torch.Generator().manual_seed(seed))


def texts_of(tokens):
    return tuple(tuple(WORDS[number] for number in row) for row in tokens.tolist())


def recorded(model, tokens, name="", mask=None, texts=None):
    trace = record(model, tokens, mask=mask)
    trace = replace(trace, token_texts=texts_of(tokens) if texts is None else texts)
    with torch.no_grad():
        logits = model(tokens, mask=mask)
    return page.Recorded(trace=trace, name=name, logits=logits, lens=lens(model, tokens, mask=mask))


def full_content():
    """Two passes, a control, a sweep and receipts: every view there is."""
    model, tokens = model_of(), tokens_of(12)
    control = tokens.clone()
    control[0, 7] = (control[0, 7] + 1) % len(WORDS)
    found = intervene(model, tokens, [Drop(sites="L2.*", sources="B1")], tap=Recorder())
    second = page.Recorded(
        trace=replace(found.trace, token_texts=texts_of(tokens)), name="without B1", logits=found.logits
    )
    return page.PageContent(
        first=recorded(model, tokens, "clean"),
        second=second,
        control=recorded(model, control, "control"),
        effects=sweep(model, tokens, every_edge(model), progress=False),
        receipts=found.receipts,
        spell=Words().tokens,
        title="Without B1",
    )


def decoded(array):
    """Reads an array of the document with numpy."""
    places = np.frombuffer(zlib.decompress(base64.b64decode(array["data"])), np.uint8).reshape(4, -1)
    numbers = np.frombuffer(places.T.tobytes(), {"float32": "<f4", "int32": "<i4"}[array["type"]])
    return numbers.reshape(array["shape"])

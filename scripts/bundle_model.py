"""Trains the model that comes with the package and puts it in place; an hour or so on two idle cores.

Run it in a clone after `source .venv/bin/activate`. It can be killed at any time and goes on where it was.
"""

import json
import shutil
from pathlib import Path

from attention_residuals.cli import main
from attention_residuals.cli.names import BUNDLED, opened
from attention_residuals.data import Corpus
from attention_residuals.models import save_model
from attention_residuals.train import evaluate

RUN = Path("runs/bundled")
COMMAND = (
    *("train", str(RUN), "--source", "standard-library", "--depth", "8", "--residual", "block"),
    *("--sequence-length", "512", "--batch-size", "8", "--num-steps", "2400"),
    *("--optimizer", "muon", "--learning-rate", "3e-3", "--saving.evaluate-every", "200"),
)

CARD = """# The model that comes with attention-residuals

A small language model of Python source text with Block attention residuals, so that there is something true
to look at right after installing. It is for looking at depth routing, and good for nothing else.

| | |
|---|---|
| shape | {layers} layers, width {width}, {blocks} blocks of {size} sublayers, {parameters:,} parameters, float32 |
| text | standard library of Python {python} ({megabytes:.1f} MB, PSF-2.0); 5 % of its files kept for validation |
| tokenizer | byte-level BPE of {vocabulary:,} tokens, trained on the same text |
| budget | {steps:,} steps of 8 x 512 tokens ({tokens:,} tokens); Muon and AdamW, peak 3e-3, cosine; seed 0 |
| quality | {nats:.3f} nats a token, {bits:.3f} bits per byte on all {valid:,} validation tokens |
| licence | Apache-2.0, as the package; the text it learned from is under PSF-2.0 |
| made by | `python scripts/bundle_model.py` |

One seed, one size, one kind of text: what its routing shows is a fact about this model. It writes wrong
programs, knows nothing, and may repeat passages of the text that it learned from.
"""


def bundle() -> int:
    """Trains, or goes on, and writes the folder when the training is done."""
    if BUNDLED.exists():
        print(f"got: {BUNDLED}, which is there\nexpected: none\ndo: remove it, or keep it")
        return 2
    code = main(COMMAND)
    if code:
        return code
    _, model, tokenizer, training = opened(RUN, "cpu")
    assert training is not None
    corpus = Corpus.load(RUN / "corpus")
    environment = json.loads((RUN / "run" / "environment.json").read_bytes())
    found = evaluate(
        model,
        corpus.valid,
        bytes_per_token=tokenizer.bytes_per_token,
        sequence_length=training.sequence_length,
        batch_size=8,
    )
    save_model(model, BUNDLED)
    shutil.copy(RUN / "run" / "tokenizer.json", BUNDLED)
    config = training.model
    card = CARD.format(
        layers=config.num_layers,
        width=config.width,
        size=config.residual.sublayers_per_block,
        blocks=-(-2 * config.num_layers // config.residual.sublayers_per_block),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        python=environment["starts"][0]["python"],
        megabytes=corpus.manifest["splits"]["train"]["bytes"] / 1e6,
        vocabulary=tokenizer.vocab_size,
        steps=training.num_steps,
        tokens=training.num_steps * training.batch_size * training.sequence_length,
        nats=found.loss,
        bits=found.bits_per_byte,
        valid=found.num_tokens,
    )
    (BUNDLED / "README.md").write_text(card, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(bundle())

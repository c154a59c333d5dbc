"""Draws the depth mixing matrix of a small trained model for every residual rule: the pictures of docs/rules.md."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from attention_residuals.data import StandardLibrary, sequential
from attention_residuals.demo.demo import prepared
from attention_residuals.layers.residual import RULES, AttnRes, ResidualConfig
from attention_residuals.models import presets
from attention_residuals.plots import mixing_map, save
from attention_residuals.stats import mixing_matrix
from attention_residuals.trace import record
from attention_residuals.train import (
    AdamW,
    Cosine,
    Saving,
    TrainConfig,
    evaluate,
    load_checkpoint_model,
    train,
)
from attention_residuals.train.evaluation import document_mask
from attention_residuals.version import __version__

DEPTH, NUM_TRACED = 6, 16


def configs() -> dict[str, ResidualConfig]:
    """Returns every rule with its default options, and the paper's in blocks."""
    rules: dict[str, ResidualConfig] = {name: config() for name, config in RULES.items()}
    return {**rules, "attnres-block": AttnRes(sublayers_per_block=4)}


def train_config(residual: ResidualConfig, vocab_size: int, num_steps: int) -> TrainConfig:
    """Makes the same small run for every rule."""
    model = presets.scaled(DEPTH, vocab_size=vocab_size, max_tokens=128)
    return TrainConfig(
        model=replace(model, residual=residual),
        optimizer=AdamW(learning_rate=4e-3),
        schedule=Cosine(warmup_steps=num_steps // 10),
        num_steps=num_steps,
        batch_size=16,
        sequence_length=128,
        seed=0,
    )


def main() -> None:
    """Trains what is not trained yet, then draws everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/rules"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=Path("docs/rules"), help="where the pictures go")
    parser.add_argument("--num-steps", type=int, default=300, help="optimizer steps of each run")
    given = parser.parse_args()
    started = (given.folder / "corpus").exists()
    corpus = prepared(StandardLibrary(), given.folder / "corpus", vocab_size=2048, started=started)
    numbers = {}
    for name, residual in configs().items():
        folder = given.folder / name
        config = train_config(residual, corpus.vocab_size, given.num_steps)
        saving = Saving(every=100, keep=1, evaluate_every=given.num_steps, evaluate_batches=8, log_every=50)
        if train(config, corpus, folder, saving=saving).interrupted:
            return
        model = load_checkpoint_model(folder)
        found = evaluate(
            model,
            corpus.valid,
            bytes_per_token=corpus.tokenizer.bytes_per_token,
            sequence_length=128,
            batch_size=32,
        )
        numbers[name] = round(found.bits_per_byte, 4)
        batch = next(sequential(corpus.valid, sequence_length=128, batch_size=NUM_TRACED))
        trace = record(model, batch.tokens_BT, mask=document_mask(batch.documents_BT))
        footer = (
            f"mean of {batch.tokens_BT.numel():,} held-out tokens; {DEPTH} layers, {given.num_steps} steps on Python's "
            f"standard library, one seed; attention_residuals {__version__}"
        )
        figure = mixing_map(mixing_matrix(trace).average(trace), title=f"M of {name}", footer=footer)
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.png").unlink(missing_ok=True)
        save(figure, given.out / f"{name}.png")
        print(f"{name:<16} {numbers[name]:.4f} bits per byte", flush=True)
    (given.folder / "bits_per_byte.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Tiny runs on several ranks, for tests and for the processes that they start."""

import json
from pathlib import Path

import torch
from parallel.pipeline_cases import RULES
from parallel.rank_processes import run_groups

from attention_residuals.data import TextFiles, prepare
from attention_residuals.models import DecoderConfig
from attention_residuals.train import AdamW, Cosine, Muon, Saving, TrainConfig

SAVING = Saving(every=2, keep=2, evaluate_every=4, evaluate_batches=2, log_every=1)
OPTIMIZERS = {"adamw": AdamW(learning_rate=3e-3), "muon": Muon(learning_rate=3e-3)}


def config_of(rule="block", optimizer="adamw", num_layers=4, tied=True, **changes):
    model = DecoderConfig(
        vocab_size=300,
        num_layers=num_layers,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        head_width=16,
        mlp_width=48,
        max_tokens=64,
        tied=tied,
        residual=RULES[rule],
    )
    values = {
        "model": model,
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": Cosine(warmup_steps=2),
        "num_steps": 6,
        "batch_size": 8,
        "sequence_length": 24,
        "seed": 3,
    }
    return TrainConfig(**(values | changes))


def make_corpus(folder):
    """Documents much shorter than a sequence, so that most sequences hold several."""
    text = "\n".join(f"{n} ducks met {n * n % 17} swans near pond {n % 5}." for n in range(300))
    (folder / "tale.txt").write_text(text)
    source = TextFiles(path=str(folder / "tale.txt"), separator="\n")
    return prepare(source, folder / "corpus", vocab_size=300, valid_fraction=0.2)


def on_ranks(folder, corpus, cases, victim=None):
    """Runs cases one after the other on as many ranks as each needs; returns what each rank found, by case.

    A victim is a rank that hangs, and is ended when all others have.
    """
    sizes = {name: _size(case["parallel"]) for name, case in cases.items()}
    group = {"work": "cases", "num_ranks": max(sizes.values()), "victim": victim}
    group |= {"corpus": str(corpus.folder), "cases": cases}
    (found,) = run_groups(folder, group, worker="run_worker.py")
    return {
        name: [rank[name] if isinstance(rank, dict) else rank for rank in found[: sizes[name]]]
        for name in cases
    }


def _size(parallel):
    names = ("replicate", "shard", "pipeline", "tensor")
    return torch.tensor([parallel.get(name, 1) for name in names]).prod().item()


def distance_of_models(one, other):
    """Relative L2 distance of all weights together."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    squares = [((a - b).square().sum(), b.square().sum()) for a, b in pairs]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt().item()


def rows_of(folder, split="train"):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]

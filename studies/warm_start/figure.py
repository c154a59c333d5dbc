"""Draws results.csv: the mean over seeds of each arm."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from attention_residuals.plots import loss_curves, save

HERE = Path(__file__).parent

if __name__ == "__main__":
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader((HERE / "results.csv").open()):
        found[row["arm"]][int(row["step"])].append(float(row["bits_per_byte"]))
    figure = loss_curves(
        {arm: [(step, mean(values)) for step, values in steps.items()] for arm, steps in found.items()},
        x_label="steps of 128 tokens",
        y_label="bits per byte",
        title="SmolLM2-135M, fine-tuned as it is and converted",
        footer="Python's standard library, 96 windows of 64 tokens that training never sees; mean of 3 seeds",
    )
    save(figure, HERE / "figure.png")

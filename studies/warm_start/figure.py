"""Draws results.csv, the mean over seeds of each arm: figure.png, and page.html with every number."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from attention_residuals.page import PageContent, ReportFigure, Section, write
from attention_residuals.plots import loss_curves, png_bytes, save

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows = list(csv.DictReader((HERE / "results.csv").open()))
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["arm"]][int(row["step"])].append(float(row["bits_per_byte"]))
    figure = loss_curves(
        {arm: [(step, mean(values)) for step, values in steps.items()] for arm, steps in found.items()},
        x_label="steps of 128 tokens",
        y_label="bits per byte",
        title="SmolLM2-135M, fine-tuned as it is and converted",
        footer="Python's standard library, 96 windows of 64 tokens that training never sees; mean of 3 seeds",
    )
    ends = ", ".join(f"{arm} {mean(steps[max(steps)]):.3f}" for arm, steps in found.items())
    section = Section(
        heading="Bits per byte of text that training never sees",
        table=(tuple(rows[0]), *(tuple(row.values()) for row in rows)),
        figures=(
            ReportFigure(
                png=png_bytes(figure), caption="Mean of 3 seeds.", alt=f"Falling curves that end at {ends}."
            ),
        ),
    )
    content = PageContent(
        title="Does a pretrained model use depth attention that it is given?",
        lead="SmolLM2-135M, converted to Block attention residuals and fine-tuned for 200 steps, beside the same "
        "model fine-tuned as it is, and beside the new parameters alone. What it means stands in README.md.",
        sections=(section,),
    )
    write(content, HERE / "page.html")
    save(figure, HERE / "figure.png")

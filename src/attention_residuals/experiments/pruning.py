"""Pruning: does attention over depth make deep layers matter more?"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import by_seed, gaps, gaps_header, plus_minus, unfinished
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale
from attention_residuals.experiments.measures import Removal
from attention_residuals.experiments.recipe import Recipe
from attention_residuals.experiments.recipes import MAIN_ARMS, main_arms, recipe_at, texts_at
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.plots import curve_plot, layer_profile

__all__ = ["Pruning"]

WAYS = {"the last": "loss without last", "the least useful": "loss without least useful"}


@dataclass(frozen=True, kw_only=True)
class Pruning(Experiment):
    """Layers taken out of trained twins: the last ones, and those that cost the least one by one.

    Args:
        recipe: Of all runs.
        measure: How many layers are taken out, and on how much text that is measured.
    """

    question: ClassVar[str] = (
        "Does attention over depth make deep layers matter more than in a standard model?"
    )

    recipe: Recipe
    measure: Removal

    @classmethod
    def at(cls, scale: Scale) -> "Pruning":
        """Returns the study at a scale; the paper has none, and names the symptom only."""
        recipe = recipe_at(scale)
        if scale == "smoke":
            measure = Removal(counts=(1, 2), num_windows=2)
            return cls(scale=scale, recipe=recipe, measure=measure, seeds=(0, 1))
        counts = tuple(range(1, recipe.shape.num_layers // 2 + 1))
        seeds = (0,) if scale == "paper" else (0, 1, 2)
        return cls(scale=scale, recipe=recipe, measure=Removal(counts=counts), seeds=seeds)

    def texts(self) -> Mapping[str, Text]:
        """Returns the one text."""
        return texts_at(self.scale)

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists all runs, seed by seed."""
        return tuple(
            Cell(
                stage="main",
                arm=arm,
                setting="",
                text="text",
                train=self.recipe.train_config(rule, seed=seed, vocab_size=vocab_sizes["text"]),
                measure=self.measure,
            )
            for seed in self.seeds
            for arm, rule in main_arms(self.recipe.shape.num_layers).items()
        )

    def report(self, table: Table) -> Report:
        """Shows what taking layers out costs, beside the standard model."""
        lines = [
            f"Question: {self.question}",
            f"Scale: {self.scale}. A cost is the loss without the layers less the loss with all, on the same windows. "
            "The least useful layers were chosen on other windows. The paper has no such study.",
        ]
        arms = {arm: list(table.done("main", arm).values()) for arm in MAIN_ARMS}
        known = {arm: runs for arm, runs in arms.items() if runs}
        figures = {}
        if known:
            footer = f"{self.scale} scale; mean of the seeds"
            figures["layers"] = layer_profile(
                {
                    arm: [
                        mean(_Cost("loss without layer", layer)(run) for run in runs)
                        for layer in range(self.recipe.shape.num_layers)
                    ]
                    for arm, runs in known.items()
                },
                y_label="nats a token",
                title="What the loss rises by without one layer",
                footer=footer,
            )
            figures["last-layers"] = curve_plot(
                {
                    arm: [
                        (float(count), mean(_Cost("loss without last", count)(run) for run in runs))
                        for count in self.measure.counts
                    ]
                    for arm, runs in known.items()
                },
                x_label="last layers taken out",
                y_label="rise of the loss, nats a token",
                title="What the loss rises by without the last layers",
                footer=footer,
            )
        grids = (*(self._grid(table, way) for way in WAYS), *unfinished(table))
        return Report("Pruning layers", tuple(lines), grids, figures)

    def _grid(self, table: Table, way: str) -> Grid:
        rows = []
        for count in self.measure.counts:
            read = _Cost(WAYS[way], count)
            costs = {arm: by_seed(table, "main", arm, quantity=read) for arm in MAIN_ARMS}
            rows.append((str(count), *map(plus_minus, costs.values()), *gaps(costs)))
        header = ("layers out", *(f"{arm} [95 %]" for arm in MAIN_ARMS), *gaps_header(MAIN_ARMS))
        return Grid(f"Rise of the loss without {way} layers, nats a token", header, tuple(rows))


@dataclass(frozen=True)
class _Cost:
    """Reads what taking layers out costs of an outcome."""

    quantity: str
    place: int

    def __call__(self, outcome: Outcome) -> float:
        return outcome.value(self.quantity, place=self.place) - outcome.value("loss whole")

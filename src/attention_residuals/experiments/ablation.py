"""The ablation: every residual rule at the same budget (paper, Table 4 and Fig. 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from statistics import mean
from typing import ClassVar

from attention_residuals.errors import DataError
from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import WANTED, by_seed, difference, mean_of, unfinished
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale
from attention_residuals.experiments.measures import FinalLoss
from attention_residuals.experiments.recipe import Recipe
from attention_residuals.experiments.recipes import recipe_at, texts_at
from attention_residuals.experiments.results import Table
from attention_residuals.layers.residual import (
    AttnRes,
    Delta,
    DenseFormer,
    Highway,
    HyperConnections,
    InputQuery,
    ManifoldHyperConnections,
    MultiHead,
    RawKeys,
    ResidualConfig,
    Sigmoid,
    SlidingWindow,
    StandardResidual,
    StaticMixing,
    ValueQuery,
)
from attention_residuals.plots import curve_plot, interval_plot
from attention_residuals.stats import Interval

__all__ = ["PAPER_LOSSES", "Ablation"]

PAPER_LOSSES: dict[str, float] = {
    "standard": 1.766,
    "denseformer": 1.767,
    "mhc": 1.747,
    "full": 1.737,
    "full, input query": 1.731,
    "full, static": 1.749,
    "full, sigmoid": 1.741,
    "full, raw keys": 1.743,
    "window 1+8": 1.764,
    "block 2": 1.746,
    "block 4": 1.746,
    "block 8": 1.748,
    "two blocks": 1.753,
    "one block": 1.757,
    "block 4, heads": 1.752,
    "block 4, raw keys": 1.750,
}
"""Of the paper's 436 M row, one run each, nats a token."""

SWEPT = ("standard", "block 4", "full")
"""Arms for which the sweep looks for the best learning rate."""

SWEEP_SEED = 1000
"""Of the sweep of learning rates, and of no other run: what is chosen on it says nothing about the others' luck."""


@dataclass(frozen=True, kw_only=True)
class Ablation(Experiment):
    """Every rule of the family, paired by seed, after a sweep of the learning rate.

    The sweep tries every rate for the standard, a Block and the Full model. The main runs of all arms have the rate
    that is best for the standard model, as the paper's had; where another one is better for Block or Full, these are
    trained with that, too. A single rate is what all runs have, without a sweep.

    Args:
        recipe: Of all runs, but for rule, seed and learning rate.
        rates: Peaks of the learning rate that the sweep tries; one is not swept.
        seeds: Of standard, Full, Block, mHC and DenseFormer.
        other_seeds: Those of ``seeds`` that all other arms have, which are exploratory.
    """

    question: ClassVar[str] = "Which residual rules lower the loss at an equal budget, and by how much?"
    compared: ClassVar[tuple[str, ...]] = ("standard", "full", "block 4", "mhc", "denseformer")

    recipe: Recipe
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    other_seeds: tuple[int, ...] = (0, 1, 2)

    @classmethod
    def at(cls, scale: Scale) -> "Ablation":
        """Returns the ablation at a scale; at paper size with one seed and no sweep."""
        if scale == "laptop":
            return cls(scale=scale, recipe=recipe_at(scale))
        recipe = recipe_at(scale)
        rates = (recipe.optimizer.learning_rate,) if scale == "paper" else (2e-3, 4e-3)
        return cls(scale=scale, recipe=recipe, rates=rates, seeds=(0,), other_seeds=(0,))

    def texts(self) -> Mapping[str, Text]:
        """Returns the one text."""
        return texts_at(self.scale)

    def arms(self) -> dict[str, ResidualConfig]:
        """Returns every rule by its name here; the compared ones come first.

        ``block S`` has blocks of S sublayers.
        """
        shape = self.recipe.shape
        size = 2 * shape.num_layers
        block = min(4, size)
        rules: dict[str, ResidualConfig] = {
            "standard": StandardResidual(),
            "full": AttnRes(sublayers_per_block=1),
            "block 4": AttnRes(sublayers_per_block=block),
            "mhc": ManifoldHyperConnections(),
            "denseformer": DenseFormer(),
            "block 2": AttnRes(sublayers_per_block=2),
            "block 8": AttnRes(sublayers_per_block=8),
            "two blocks": AttnRes(sublayers_per_block=shape.num_layers),
            "one block": AttnRes(sublayers_per_block=size),
            "full, input query": InputQuery(),
            "full, static": StaticMixing(),
            "full, sigmoid": Sigmoid(),
            "full, raw keys": RawKeys(),
            "window 1+8": SlidingWindow(window=8),
            "block 4, heads": MultiHead(num_heads=shape.num_heads, sublayers_per_block=block),
            "block 4, raw keys": RawKeys(sublayers_per_block=block),
            "full, value query": ValueQuery(),
            "delta": Delta(),
            "hc": HyperConnections(),
            "highway": Highway(),
        }
        if size <= 8:
            del rules["block 8"]
        return rules

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists the sweep, and the main runs once all of it has ended.

        Raises:
            DataError: No rate of the sweep works for the standard model.
        """
        sweep = self._sweep(vocab_sizes)
        if any(cell.key not in table.outcomes for cell in sweep):
            return sweep
        best = {arm: self.best_rate(table, arm) for arm in SWEPT}
        rate = best.pop("standard")
        if rate is None:
            raise DataError(
                got="a sweep without a rate that works for the standard model",
                expected="one that does not diverge",
                do="start another study with lower rates",
            )
        return (*sweep, *self._main(vocab_sizes, rate), *self._own(vocab_sizes, rate, best))

    def foreseen(self, vocab_sizes: Mapping[str, int]) -> tuple[Cell, ...]:
        """Lists the sweep and the main runs, as if all rules liked the same rate."""
        return (*self._sweep(vocab_sizes), *self._main(vocab_sizes, self.rates[len(self.rates) // 2]))

    def best_rate(self, table: Table, arm: str) -> float | None:
        """Returns the rate at which an arm of the sweep ends with the lowest loss; None where none has ended well."""
        if len(self.rates) == 1:
            return self.rates[0]
        losses = {rate: by_seed(table, "sweep", arm, _setting(rate)).get(SWEEP_SEED) for rate in self.rates}
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        return min(known, key=lambda rate: known[rate]) if known else None

    def report(self, table: Table) -> Report:
        """Compares every arm with the standard model."""
        rate = self.best_rate(table, "standard")
        is_swept = len(self.rates) > 1
        grids, figures = [self._sweep_grid(table)] if is_swept else [], {}
        lines = [f"Question: {self.question}", f"Scale: {self.scale}; recipe: {self.recipe}."]
        if rate is not None:
            grids.append(self._main_grid(table, _setting(rate)))
            losses = {arm: by_seed(table, "main", arm, _setting(rate)) for arm in self.arms()}
            base = losses.pop("standard")
            found = {arm: difference(own, base) for arm, own in losses.items()}
            chosen = "that is best for the standard model" if is_swept else "of the recipe, not swept"
            lines.append(
                f"All main runs have the rate {chosen}, {rate:g}. Differences are paired by seed, with Student's "
                f"intervals of 95 %, each by itself: of {len(found)}, {0.05 * len(found):.2g} are expected to miss. "
                "Arms after the first five are exploratory. The paper's numbers are single runs of another size and "
                "text."
            )
            shown = {arm: _beside_paper(arm, one.interval) for arm, one in found.items() if one.interval}
            if shown:
                figures["ablation"] = interval_plot(
                    {"residual rules": shown},
                    x_label="validation loss less that of the standard model, nats a token",
                    title="Residual rules beside the standard residual",
                    footer=f"{self.scale} scale; paired by seed, intervals of 95 %; the paper's are single runs",
                )
        curves = self._curves(table)
        if curves:
            figures["rates"] = curve_plot(
                curves,
                x_label="peak learning rate",
                y_label="validation loss, nats a token",
                title="How much learning rate each rule bears",
                footer=f"{self.scale} scale; one seed, which no other run has",
                logarithmic=True,
            )
        return Report("Ablation of residual rules", tuple(lines), (*grids, *unfinished(table)), figures)

    def _sweep(self, vocab_sizes: Mapping[str, int]) -> tuple[Cell, ...]:
        rates = self.rates if len(self.rates) > 1 else ()  # of one there is nothing to choose
        return tuple(
            self._cell("sweep", arm, rate, SWEEP_SEED, vocab_sizes) for rate in rates for arm in SWEPT
        )

    def _main(self, vocab_sizes: Mapping[str, int], rate: float) -> tuple[Cell, ...]:
        """Lists the main runs seed by seed, so that differences have their partners early."""
        return tuple(
            self._cell("main", arm, rate, seed, vocab_sizes)
            for seed in self.seeds
            for arm in self.arms()
            if arm in self.compared or seed in self.other_seeds
        )

    def _own(
        self, vocab_sizes: Mapping[str, int], rate: float, best: Mapping[str, float | None]
    ) -> tuple[Cell, ...]:
        return tuple(
            self._cell("own rate", arm, own, seed, vocab_sizes)
            for seed in self.seeds
            for arm, own in best.items()
            if own is not None and own != rate
        )

    def _cell(self, stage: str, arm: str, rate: float, seed: int, vocab_sizes: Mapping[str, int]) -> Cell:
        train = self.recipe.at_rate(rate).train_config(
            self.arms()[arm], seed=seed, vocab_size=vocab_sizes["text"]
        )
        return Cell(
            stage=stage, arm=arm, setting=_setting(rate), text="text", train=train, measure=FinalLoss()
        )

    def _main_grid(self, table: Table, setting: str) -> Grid:
        rows = []
        for arm in (*self.arms(), "block 4, own rate", "full, own rate"):
            own = arm.endswith(", own rate")
            name = arm.removesuffix(", own rate")
            losses = by_seed(table, "own rate", name) if own else by_seed(table, "main", arm, setting)
            if own and not losses:
                continue
            found = difference(losses, by_seed(table, "main", "standard", setting))
            stage = "own rate" if own else "main"
            added = [one.value("parameters of the rule") for one in table.done(stage, name).values()]
            paper = PAPER_LOSSES.get(arm)
            rows.append(
                (
                    arm,
                    f"{added[0]:,.0f}" if added else "-",
                    str(len(losses)),
                    mean_of(losses),
                    "" if arm == "standard" else found.told(),
                    "-" if found.needed is None or arm == "standard" else str(found.needed),
                    "-" if paper is None else f"{paper:.3f}",
                    "-" if paper is None else f"{paper - PAPER_LOSSES['standard']:+.3f}",
                )
            )
        header = (
            "arm",
            "parameters added",
            "seeds",
            "loss, nats",
            "less standard [95 %]",
            f"seeds that would show {WANTED:g}",
            "paper",
            "paper less standard",
        )
        return Grid("Loss by residual rule", header, tuple(rows))

    def _sweep_grid(self, table: Table) -> Grid:
        rows = tuple(
            (f"{rate:g}", *(mean_of(by_seed(table, "sweep", arm, _setting(rate))) for arm in SWEPT))
            for rate in self.rates
        )
        return Grid("Sweep of the learning rate: validation loss", ("rate", *SWEPT), rows)

    def _curves(self, table: Table) -> dict[str, list[tuple[float, float]]]:
        curves: dict[str, list[tuple[float, float]]] = {}
        for arm in SWEPT:
            found = {rate: by_seed(table, "sweep", arm, _setting(rate)) for rate in self.rates}
            points = [(rate, mean(losses.values())) for rate, losses in found.items() if losses]
            if points:
                curves[arm] = points
        return curves


def _beside_paper(arm: str, interval: Interval) -> dict[str, Interval]:
    """Puts the paper's number, which has no interval, beside ours."""
    if arm not in PAPER_LOSSES:
        return {"here": interval}
    return {"here": interval, "paper": Interval(PAPER_LOSSES[arm] - PAPER_LOSSES["standard"], nan, nan)}


def _setting(rate: float) -> str:
    return f"rate {rate:g}"

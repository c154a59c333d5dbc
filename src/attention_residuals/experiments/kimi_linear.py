"""Kimi Linear: attention residuals in the paper's own architecture, and what each kind of sublayer reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from statistics import mean
from typing import ClassVar

from attention_residuals.experiments.comparing import (
    WANTED,
    at_end,
    by_seed,
    difference,
    mean_of,
    plus_minus,
)
from attention_residuals.experiments.dynamics import TrainingDynamics
from attention_residuals.experiments.experiment import Grid, Report, Scale
from attention_residuals.experiments.measures import Routing
from attention_residuals.experiments.recipes import MAIN_ARMS, kimi_recipe_at
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.plots import interval_plot
from attention_residuals.stats import Interval, seed_interval

__all__ = ["KimiLinear", "beyond_own_mlp"]

STATISTICS: dict[str, str] = {
    "entropy": "entropy (1: all alike)",
    "newest": "weight on the newest source",
    "embedding": "weight on the embedding",
    "far": "reach back beyond a third",
}
"""What ``Routing`` measures, in words."""

ATTENTION, MLPS = ("KDA", "MLA"), ("MLP", "MoE")
KINDS = (*ATTENTION, *MLPS, "output")
READERS = MAIN_ARMS[1:]
"""The rules that choose what to read."""


@dataclass(frozen=True, kw_only=True)
class KimiLinear(TrainingDynamics):
    """Standard, Block and Full Kimi Linear models: loss, dynamics, and routing by kind of sublayer.

    Args:
        measure: Routing and dynamics, and how often.
    """

    question: ClassVar[str] = (
        "In the paper's own architecture, do attention sites read broadly and MLP sites locally, in layers of KDA and "
        "of MLA alike?"
    )
    title: ClassVar[str] = "Kimi Linear with attention residuals"
    arms: ClassVar[tuple[str, ...]] = MAIN_ARMS

    measure: Routing

    @classmethod
    def at(cls, scale: Scale) -> "KimiLinear":
        """Returns the study at a scale; at paper size it is the 436 M row with one seed."""
        recipe = kimi_recipe_at(scale)
        if scale == "smoke":
            return cls(scale=scale, recipe=recipe, measure=Routing(points=2, num_windows=2), seeds=(0, 1))
        seeds = (0,) if scale == "paper" else (0, 1, 2)
        return cls(scale=scale, recipe=recipe, measure=Routing(points=2), seeds=seeds)

    def report(self, table: Table) -> Report:
        """Adds the differences of losses, and the routing of each kind, to what the dynamics show."""
        report = super().report(table)
        losses = {arm: by_seed(table, "main", arm) for arm in self.arms}
        found = {arm: difference(losses[arm], losses["standard"]) for arm in READERS}
        needed = ", ".join(f"{arm} {one.needed or '-'}" for arm, one in found.items())
        lines = (
            *report.lines,
            "Differences are paired by seed; intervals are Student's of 95 % over seeds, each by itself. Seeds that "
            f"would show {WANTED:g} nats: {needed}.",
            "Routing is a mean over tokens and over the sites of a kind. The standard model has no choice of sources, "
            "nor has the first attention. Kinds sit at different depths, with more or fewer sources to choose from: "
            "what equal weights, which all sites have before training, amount to stands beside. A site reads broadly "
            "where its entropy is high and little is on the newest source. Reach back is the weight on sources more "
            "than a third of the model back, the embedding apart.",
        )
        grids = (*report.grids[:2], self._routing(table), self._beside(table), *report.grids[2:])
        figures, footer = dict(report.figures), f"{self.scale} scale; intervals of 95 % over seeds"
        gains = {arm: {"": one.interval} for arm, one in found.items() if one.interval is not None}
        if gains:
            figures["loss-by-rule"] = interval_plot(
                {"validation loss": gains},
                x_label="less that of the standard model, nats a token",
                title="Residual rules in Kimi Linear",
                footer=f"{footer}, paired",
            )
        panels = {words: self._marks(table, name) for name, words in STATISTICS.items()}
        if any(panels[STATISTICS["entropy"]].values()):
            figures["routing-by-kind"] = interval_plot(
                panels,
                x_label="mean over sites and tokens",
                title="What each kind of sublayer reads",
                footer=f"{footer}; equal weights: before training",
            )
            figures["attention-beside-mlp"] = interval_plot(
                {words: self._gaps(table, name) for name, words in STATISTICS.items()},
                x_label="attention less the MLP of its layer, each beyond equal weights",
                title="Does attention read more broadly?",
                footer=footer,
            )
        return report._replace(lines=lines, grids=grids, figures=figures)

    def _routing(self, table: Table) -> Grid:
        rows = []
        for name, words in STATISTICS.items():
            for kind in KINDS:
                told = []
                for arm in READERS:
                    equal, learned = self._means(table, arm, f"{name}, {kind}")
                    told += [mean_of(equal), plus_minus(learned, ".4f")]
                rows.append((words, kind, *told))
        header = (f"{arm}{what}" for arm in READERS for what in (", equal weights", " [95 %]"))
        title = "Routing by kind of sublayer, at the end of training"
        return Grid(title, ("number", "kind", *header), tuple(rows))

    def _beside(self, table: Table) -> Grid:
        rows = tuple(
            (words, kind, *(plus_minus(self._gap(table, arm, name, kind), "+.4f") for arm in READERS))
            for name, words in STATISTICS.items()
            for kind in ATTENTION
        )
        title = "What attention has learned, less what the MLP of the same layer has"
        header = ("number beyond equal weights", "kind", *(f"{arm} [95 %]" for arm in READERS))
        return Grid(title, header, rows)

    def _marks(self, table: Table, name: str) -> dict[str, dict[str, Interval]]:
        """Returns the intervals of a statistic by kind and arm, and what equal weights amount to."""
        rows: dict[str, dict[str, Interval]] = {kind: {} for kind in KINDS}
        for kind, row in rows.items():
            for arm in READERS:
                equal, learned = self._means(table, arm, f"{name}, {kind}")
                if learned:
                    row[arm] = _interval(learned)
                    row[f"{arm}, equal weights"] = Interval(mean(equal.values()), nan, nan)
        return rows

    def _gaps(self, table: Table, name: str) -> dict[str, dict[str, Interval]]:
        gaps = {kind: {arm: self._gap(table, arm, name, kind) for arm in READERS} for kind in ATTENTION}
        return {kind: {arm: _interval(gap) for arm, gap in row.items() if gap} for kind, row in gaps.items()}

    def _gap(self, table: Table, arm: str, name: str, kind: str) -> dict[int, float]:
        return by_seed(table, "main", arm, quantity=beyond_own_mlp(name, kind))

    def _means(self, table: Table, arm: str, quantity: str) -> tuple[dict[int, float], dict[int, float]]:
        """Returns the mean over sites before training and at its end, by seed."""

        def read(series: Callable[[Outcome, str], Mapping[int, float]]) -> dict[int, float]:
            return by_seed(table, "main", arm, quantity=lambda one: mean(series(one, quantity).values()))

        return read(_at_start), read(at_end)


def beyond_own_mlp(name: str, kind: str) -> Callable[[Outcome], float]:
    """Makes what reads a difference of an outcome: of attention and the MLP behind it, in the same layer.

    Both are counted beyond what equal weights amount to, since the MLP has other sources to choose from. The
    mean is over the layers with that kind of attention in which both have a choice.

    Args:
        name: Of a statistic, as in ``STATISTICS``.
        kind: Of attention.
    """

    def read(outcome: Outcome) -> float:
        attention = _learned(outcome, f"{name}, {kind}")
        mlp: dict[int, float] = {}
        for other in MLPS:
            mlp |= _learned(outcome, f"{name}, {other}")
        return mean(attention[layer] - mlp[layer] for layer in attention)

    return read


def _learned(outcome: Outcome, quantity: str) -> dict[int, float]:
    equal, found = _at_start(outcome, quantity), at_end(outcome, quantity)
    return {layer: found[layer] - equal[layer] for layer in found}


def _at_start(outcome: Outcome, quantity: str) -> Mapping[int, float]:
    return outcome.series(quantity, step=0)


def _interval(numbers: Mapping[int, float]) -> Interval:
    """Returns the interval over seeds; of one seed, its number without one."""
    values = list(numbers.values())
    return seed_interval(values) if len(values) > 1 else Interval(values[0], nan, nan)

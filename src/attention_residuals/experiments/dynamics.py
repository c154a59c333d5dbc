"""Training dynamics: loss, output magnitude and gradient magnitude through training (paper, Fig. 5)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import (
    at_end,
    by_seed,
    gaps,
    gaps_header,
    mean_of,
    plus_minus,
    unfinished,
)
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale
from attention_residuals.experiments.measures import Dynamics
from attention_residuals.experiments.recipe import Recipe
from attention_residuals.experiments.recipes import main_arms, recipe_at, texts_at
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.plots import layer_profile, loss_curves

__all__ = ["TrainingDynamics", "growth", "unevenness"]


def growth(magnitudes: Mapping[int, float]) -> float:
    """Says how many times the state of the last layer is that of the first.

    Under Block, a state is the sum of the newest block so far: compare where first and last layer end a block.

    Args:
        magnitudes: By layer.

    Example:
        >>> growth({0: 1.0, 1: 2.0, 2: 3.0})
        3.0
    """
    return magnitudes[max(magnitudes)] / magnitudes[min(magnitudes)]


def unevenness(magnitudes: Mapping[int, float]) -> float:
    """Says how many times the largest magnitude of a layer is the smallest; 1 where all are alike.

    Example:
        >>> unevenness({0: 4.0, 1: 2.0, 2: 3.0})
        2.0
    """
    return max(magnitudes.values()) / min(magnitudes.values())


@dataclass(frozen=True, kw_only=True)
class TrainingDynamics(Experiment):
    """The standard and a Block model, measured at several steps; see ``measures.Dynamics`` for what exactly.

    Args:
        recipe: Of all runs.
        measure: What is measured, and how often.
    """

    question: ClassVar[str] = "Does Block bound the output of layers, and make gradients even over depth?"
    title: ClassVar[str] = "Training dynamics"
    arms: ClassVar[tuple[str, ...]] = ("standard", "block")

    recipe: Recipe
    measure: Dynamics

    @classmethod
    def at(cls, scale: Scale) -> "TrainingDynamics":
        """Returns the study at a scale. The paper's own is a mixture of experts of 48 B; here it is the 436 M row."""
        if scale == "smoke":
            measure = Dynamics(points=2, num_windows=2)
            return cls(scale=scale, recipe=recipe_at(scale), measure=measure, seeds=(0, 1))
        seeds = (0,) if scale == "paper" else (0, 1, 2)
        return cls(scale=scale, recipe=recipe_at(scale), measure=Dynamics(), seeds=seeds)

    def texts(self) -> Mapping[str, Text]:
        """Returns the one text."""
        return texts_at(self.scale)

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists all runs, seed by seed."""
        rules = main_arms(self.recipe.shape.num_layers)
        return tuple(
            Cell(
                stage="main",
                arm=arm,
                setting="",
                text="text",
                train=self.recipe.train_config(rules[arm], seed=seed, vocab_size=vocab_sizes["text"]),
                measure=self.measure,
            )
            for seed in self.seeds
            for arm in self.arms
        )

    def report(self, table: Table) -> Report:
        """Shows the three quantities of the paper's figure, with what can be told of their differences."""
        lines = [
            f"Question: {self.question}",
            f"Scale: {self.scale}. Output magnitude: RMS of the newest source that the next layer's attention can "
            "read, over channels and real tokens. Gradient magnitude: RMS of the gradient of the mean loss of a token "
            "with respect to what a layer's MLP writes. The paper does not define its statistics.",
        ]
        done = {arm: table.done("main", arm) for arm in self.arms}
        figures = {}
        if all(done.values()):
            arms = {arm: list(runs.values()) for arm, runs in done.items()}
            footer = f"{self.scale} scale; mean of the seeds"
            figures["loss"] = loss_curves(
                {arm: _curve(runs) for arm, runs in arms.items()},
                x_label="step",
                y_label="validation loss, nats a token",
                title="Loss through training",
                footer=footer,
            )
            for quantity, label in (
                ("output magnitude", "RMS of the state after the layer"),
                ("gradient magnitude", "RMS of the gradient at the MLP's output"),
            ):
                figures[quantity.replace(" ", "-")] = layer_profile(
                    {arm: _profile(runs, quantity) for arm, runs in arms.items()},
                    y_label=label,
                    title=f"{quantity.capitalize()} by layer, at the end of training",
                    footer=footer,
                )
        grids = (self._losses(table), self._magnitudes(table), *unfinished(table))
        return Report(self.title, tuple(lines), grids, figures)

    def _losses(self, table: Table) -> Grid:
        steps = sorted(
            {step for one in table.done("main").values() for step in one.series("validation loss")}
        )
        rows = []
        for step in steps:
            losses = {arm: by_seed(table, "main", arm, quantity=_loss_at(step)) for arm in self.arms}
            rows.append((str(step), *map(mean_of, losses.values()), *gaps(losses)))
        header = ("step", *self.arms, *gaps_header(self.arms))
        return Grid("Validation loss, nats a token", header, tuple(rows))

    def _magnitudes(self, table: Table) -> Grid:
        rows = []
        measured = sorted(
            {
                n.step
                for one in table.done("main").values()
                for n in one.numbers
                if n.place is not None and n.step is not None
            }
        )
        for step in measured:
            for name, quantity, number in (
                ("output magnitude, last layer over first", "output magnitude", growth),
                ("gradient magnitude, largest over smallest", "gradient magnitude", unevenness),
            ):
                told = []
                for arm in self.arms:
                    runs = table.done("main", arm)
                    told.append(
                        plus_minus(
                            {key.seed: number(one.series(quantity, step=step)) for key, one in runs.items()}
                        )
                    )
                rows.append((str(step), name, *told))
        return Grid("Over depth [95 %]", ("step", "ratio", *self.arms), tuple(rows))


def _loss_at(step: int) -> Callable[[Outcome], float]:
    return lambda outcome: outcome.value("validation loss", step=step)


def _curve(runs: list[Outcome]) -> list[tuple[float, float]]:
    series = [run.series("validation loss") for run in runs]
    return [(float(step), mean(one[step] for one in series)) for step in sorted(series[0])]


def _profile(runs: list[Outcome], quantity: str) -> list[float]:
    last = [at_end(run, quantity) for run in runs]
    return [mean(one[layer] for one in last) for layer in sorted(last[0])]

"""Scaling: how the loss falls with compute, and how much compute a rule saves (paper, Table 2 and Fig. 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log
from statistics import geometric_mean
from typing import ClassVar

from attention_residuals.errors import ConfigError
from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import (
    by_seed,
    final_loss,
    gaps,
    gaps_header,
    mean_of,
    unfinished,
)
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale
from attention_residuals.experiments.measures import FinalLoss
from attention_residuals.experiments.recipe import Recipe, Shape
from attention_residuals.experiments.recipes import (
    LAPTOP,
    MAIN_ARMS,
    PAPER_RUNS,
    SMOKE,
    main_arms,
    paper_recipe,
    texts_at,
)
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.plots import curve_plot
from attention_residuals.stats import PowerLaw, compute_multiplier, power_law, seed_interval

__all__ = ["PAPER_SCALING", "Scaling", "on_the_dial"]

PAPER_SCALING: dict[str, tuple[float, float, float]] = {
    "paper-194m": (1.931, 1.909, 1.899),
    "paper-241m": (1.895, 1.875, 1.874),
    "paper-296m": (1.829, 1.809, 1.804),
    "paper-436m": (1.766, 1.746, 1.737),
    "paper-528m": (1.719, 1.693, 1.692),
}
"""Losses of the paper's Table 2: standard, Block, Full; one run each."""


def on_the_dial(num_layers: int, *, tokens_per_parameter: float, learning_rate: float) -> Recipe:
    """Makes the recipe of one laptop size: width 4 a layer, heads 8 wide, and tokens in proportion to parameters.

    Args:
        num_layers: L, even, 2 or more.
        tokens_per_parameter: Training tokens for each number in the matrices of the layers.
        learning_rate: The peak, the same for all sizes.

    Example:
        >>> recipe = on_the_dial(10, tokens_per_parameter=10.0, learning_rate=4e-3)
        >>> recipe.shape.width, recipe.shape.num_parameters, recipe.num_steps
        (40, 188800, 922)
    """
    width = 4 * num_layers
    shape = Shape(
        num_layers=num_layers,
        width=width,
        num_heads=width // 8,
        head_width=8,
        mlp_width=8 * round(width / 3),
    )
    steps = round(shape.num_parameters * tokens_per_parameter / LAPTOP.tokens_per_step)
    return replace(LAPTOP, shape=shape, num_steps=max(1, steps)).at_rate(learning_rate)


@dataclass(frozen=True, kw_only=True)
class Scaling(Experiment):
    """Five sizes, three rules: L = A C^-alpha for each, and the compute multiplier at several C.

    C is what ``training_flops`` counts. Fits are made over all runs of an arm. Multipliers are fitted for each seed
    alone, and their intervals are Student's over the seeds, in the logarithm.

    Args:
        sizes: Recipes by name, from small to large.
    """

    question: ClassVar[str] = (
        "How much compute does attention over depth save, and does it depend on the amount?"
    )

    sizes: tuple[tuple[str, Recipe], ...]

    @classmethod
    def at(cls, scale: Scale) -> "Scaling":
        """Returns the study at a scale; at paper size with the five rows of Table 2 and one seed."""
        if scale == "paper":
            return cls(
                scale=scale, sizes=tuple((name, paper_recipe(name)) for name in PAPER_RUNS), seeds=(0,)
            )
        if scale == "laptop":
            layers = (6, 8, 10, 12, 14)
            sizes = [
                (f"{number} layers", on_the_dial(number, tokens_per_parameter=10.0, learning_rate=4e-3))
                for number in layers
            ]
            return cls(scale=scale, sizes=tuple(sizes))
        return cls(
            scale=scale,
            sizes=tuple((f"{steps} steps", replace(SMOKE, num_steps=steps)) for steps in (2, 4, 8)),
            seeds=(0, 1),
        )

    def texts(self) -> Mapping[str, Text]:
        """Returns the one text."""
        return texts_at(self.scale)

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists all runs, small ones first."""
        return tuple(
            Cell(
                stage="main",
                arm=arm,
                setting=name,
                text="text",
                train=recipe.train_config(rule, seed=seed, vocab_size=vocab_sizes["text"]),
                measure=FinalLoss(),
            )
            for name, recipe in self.sizes
            for seed in self.seeds
            for arm, rule in main_arms(recipe.shape.num_layers).items()
        )

    def report(self, table: Table) -> Report:
        """Fits the laws and reads off the multipliers."""
        lines = [
            f"Question: {self.question}",
            f"Scale: {self.scale}. C counts the operations of training (three forward passes; attention, depth reads "
            "and head included). The paper does not say how it counts.",
        ]
        grids, figures = [self._losses(table)], {}
        runs = {arm: self._points(table, arm) for arm in MAIN_ARMS}
        known = sorted({compute for points in runs.values() for compute, _ in points})
        if len(known) >= 2:
            unit = geometric_mean(known)
            grids += [self._laws(runs, unit), self._multipliers(table, unit, known)]
            lines.append(f"A is the loss at C = {unit:.3g} FLOP, the geometric mean of all runs.")
            figures["scaling"] = curve_plot(
                {arm: points for arm, points in self._means(table).items() if points},
                x_label="C, FLOP of training",
                y_label="validation loss, nats a token",
                title="Loss by compute",
                footer=f"{self.scale} scale; mean of the seeds",
                logarithmic=True,
            )
        return Report("Scaling with compute", tuple(lines), (*grids, *unfinished(table)), figures)

    def _points(self, table: Table, arm: str, seed: int | None = None) -> list[tuple[float, float]]:
        done = table.done("main", arm)
        return sorted(_point(one) for key, one in done.items() if seed in (None, key.seed))

    def _means(self, table: Table) -> dict[str, list[tuple[float, float]]]:
        curves: dict[str, list[tuple[float, float]]] = {arm: [] for arm in MAIN_ARMS}
        for (name, _), arm in ((size, arm) for size in self.sizes for arm in curves):
            points = [_point(one) for one in table.done("main", arm, name).values()]
            if points:
                curves[arm].append((points[0][0], sum(loss for _, loss in points) / len(points)))
        return curves

    def _losses(self, table: Table) -> Grid:
        rows = []
        for name, recipe in self.sizes:
            losses = {arm: by_seed(table, "main", arm, name) for arm in MAIN_ARMS}
            paper = PAPER_SCALING.get(name)
            told = "-" if paper is None else " / ".join(f"{loss:.3f}" for loss in paper)
            compute = [_point(one)[0] for one in table.done("main", "standard", name).values()]
            rows.append(
                (
                    name,
                    f"{recipe.shape.num_parameters:,}",
                    f"{compute[0]:.3g}" if compute else "-",
                    str(len(losses["standard"])),
                    *map(mean_of, losses.values()),
                    *gaps(losses),
                    told,
                )
            )
        header = (
            "size",
            "parameters in layers",
            "C, FLOP",
            "seeds",
            *MAIN_ARMS,
            *gaps_header(MAIN_ARMS),
            "paper: standard / block / full",
        )
        return Grid("Validation loss, nats a token", header, tuple(rows))

    def _laws(self, runs: Mapping[str, list[tuple[float, float]]], unit: float) -> Grid:
        rows = []
        paper = {"standard": "0.057", "block": "0.058", "full": "0.057"}
        for arm, points in runs.items():
            law = _law(points, unit)
            if law is None:
                continue
            (scale, low, high), exponent = law.scale, law.exponent
            rows.append(
                (
                    arm,
                    str(len(points)),
                    f"{scale:.4f} [{low:.4f}, {high:.4f}]",
                    f"{exponent.estimate:.4f} [{exponent.low:.4f}, {exponent.high:.4f}]",
                    f"{100 * law.residual:.2f} %",
                    paper[arm],
                )
            )
        header = ("arm", "runs", "A, nats [95 %]", "alpha [95 %]", "spread about the line", "paper's alpha")
        return Grid("Fits of L = A C^-alpha", header, tuple(rows))

    def _multipliers(self, table: Table, unit: float, known: list[float]) -> Grid:
        at = (known[0], geometric_mean([known[0], known[-1]]), known[-1])
        rows = tuple(
            (arm, *(self._multiplier(table, arm, compute, unit) for compute in at))
            for arm in ("block", "full")
        )
        header = ("arm", *(f"at C = {compute:.3g} FLOP [95 %]" for compute in at))
        title = "Compute that the standard model would need for the same loss (paper: Block 1.25 at its largest C)"
        return Grid(title, header, rows)

    def _multiplier(self, table: Table, arm: str, compute: float, unit: float) -> str:
        logs = []
        for seed in self.seeds:
            base, own = (_law(self._points(table, one, seed), unit) for one in ("standard", arm))
            if base is None or own is None:
                continue
            try:
                logs.append(log(compute_multiplier(base, own, compute / unit)))
            except ConfigError:  # a standard model that does not gain from compute has no multiplier
                continue
        if len(logs) < 2:
            return f"{exp(logs[0]):.3f} (1 seed)" if logs else "-"
        estimate, low, high = (exp(number) for number in seed_interval(logs))
        return f"{estimate:.3f} [{low:.3f}, {high:.3f}]"


def _point(outcome: Outcome) -> tuple[float, float]:
    return outcome.value("training FLOP"), final_loss(outcome)


def _law(points: list[tuple[float, float]], unit: float) -> PowerLaw | None:
    """Fits a law where there are two sizes or more."""
    if len({compute for compute, _ in points}) < 2:
        return None
    return power_law([compute / unit for compute, _ in points], [loss for _, loss in points])

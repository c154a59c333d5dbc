"""Shape at fixed compute: does attention over depth favour deeper, narrower models? Paper, Fig. 7."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import ClassVar

from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import by_seed, gaps, gaps_header, mean_of, unfinished
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale
from attention_residuals.experiments.measures import FinalLoss
from attention_residuals.experiments.recipe import Recipe, Shape
from attention_residuals.experiments.recipes import main_arms, recipe_at, texts_at
from attention_residuals.experiments.results import Table
from attention_residuals.layers.residual import StandardResidual
from attention_residuals.plots import curve_plot

__all__ = ["ShapeGrid", "shaped"]

ARMS = ("standard", "full")
"""The paper does not say which form its figure has; Full needs no choice of blocks, which change with depth."""


def shaped(num_parameters: float, width_per_layer: float, heads_per_layer: float) -> Shape:
    """Finds the shape of about so many parameters with the given ratios.

    The MLP is 8/3 of the width, in steps of 8; heads together are about as wide as the model, so their number costs
    nothing. A layer then has 12 D^2 parameters, and D = r L gives L.

    Args:
        num_parameters: In the matrices of layers, > 0; met within what whole numbers allow.
        width_per_layer: r = D / L.
        heads_per_layer: H / L; at least one head there is.

    Example:
        >>> [shaped(2.5e5, ratio, 0.5).num_layers for ratio in (3.0, 6.0, 12.0)]
        [13, 8, 5]
        >>> shaped(2.5e5, 6.0, 0.5)
        Shape(num_layers=8, width=48, num_heads=4, head_width=12, mlp_width=128, tied=True)
    """
    num_layers = max(2, round((num_parameters / (12 * width_per_layer**2)) ** (1 / 3)))
    width = 2 * round(width_per_layer * num_layers / 2)
    num_heads = max(1, round(heads_per_layer * num_layers))
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        head_width=max(2, 2 * round(width / num_heads / 2)),
        mlp_width=8 * max(1, round(width / 3)),
    )


@dataclass(frozen=True, kw_only=True)
class ShapeGrid(Experiment):
    """A grid of D / L and H / L at equal compute: shapes of about the same size, with as many steps as that affords.

    Args:
        recipe: Of all runs, but for the shape and the number of steps.
        num_parameters: About that of every shape.
        flops: Of every run, met within a step.
        widths_per_layer: The grid's D / L.
        heads_per_layer: The grid's H / L.
    """

    question: ClassVar[str] = "Does attention over depth move the best shape to deeper and narrower?"

    recipe: Recipe
    num_parameters: float
    flops: float
    widths_per_layer: tuple[float, ...]
    heads_per_layer: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1)

    @classmethod
    def at(cls, scale: Scale) -> "ShapeGrid":
        """Returns the study at a scale: 3 x 3 on a laptop, the paper's 5 x 5 with its compute at paper size."""
        recipe = recipe_at(scale)
        if scale == "paper":
            return cls(
                scale=scale,
                recipe=recipe,
                num_parameters=2.3e8,
                flops=6.5e19,
                widths_per_layer=(15.0, 30.0, 45.0, 60.0, 75.0),
                heads_per_layer=(0.3, 0.4, 0.5, 0.6, 0.7),
                seeds=(0,),
            )
        if scale == "laptop":
            return cls(
                scale=scale,
                recipe=recipe,
                num_parameters=2.5e5,
                flops=4e12,
                widths_per_layer=(3.0, 6.0, 12.0),
                heads_per_layer=(0.3, 0.5, 0.7),
            )
        return cls(
            scale=scale,
            recipe=recipe,
            num_parameters=3e3,
            flops=1e7,
            widths_per_layer=(3.0, 8.0),
            heads_per_layer=(0.5,),
            seeds=(0,),
        )

    def texts(self) -> Mapping[str, Text]:
        """Returns the one text."""
        return texts_at(self.scale)

    def sized(self, width_per_layer: float, heads_per_layer: float, vocab_size: int) -> Recipe:
        """Makes the recipe of a cell of the grid: its shape, and as many steps as the compute affords.

        The standard model's compute decides, so that both arms see the same text.
        """
        shape = shaped(self.num_parameters, width_per_layer, heads_per_layer)
        recipe = replace(self.recipe, shape=replace(shape, tied=self.recipe.shape.tied))
        one = recipe.train_config(StandardResidual(), seed=0, vocab_size=vocab_size)
        return replace(recipe, num_steps=max(1, round(self.flops / training_flops(one, 1))))

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists all runs, seed by seed."""
        grid = list(product(self.widths_per_layer, self.heads_per_layer))
        recipes = {place: self.sized(*place, vocab_sizes["text"]) for place in grid}
        return tuple(
            Cell(
                stage="main",
                arm=arm,
                setting=_setting(*place),
                text="text",
                train=recipes[place].train_config(
                    main_arms(recipes[place].shape.num_layers)[arm],
                    seed=seed,
                    vocab_size=vocab_sizes["text"],
                ),
                measure=FinalLoss(),
            )
            for seed in self.seeds
            for place in grid
            for arm in ARMS
        )

    def report(self, table: Table) -> Report:
        """Shows losses over the grid, and where the best shape is."""
        lines = [
            f"Question: {self.question}",
            f"Scale: {self.scale}; {self.flops:.3g} FLOP and about {self.num_parameters:,.0f} parameters in the layers "
            "of every run. Paper: the best is (60, 0.3) for the standard model and (45, 0.3) with attention over "
            "depth, which is better in all 25 cells, by 0.019 to 0.063.",
        ]
        best = {arm: self._best(table, arm) for arm in ARMS}
        lines += [f"Best shape of {arm}: {place}." for arm, place in best.items() if place]
        curves = self._curves(table)
        figures = {}
        if curves:
            figures["shape"] = curve_plot(
                curves,
                x_label="width for each layer, D / L",
                y_label="validation loss, nats a token",
                title="Loss by shape at equal compute",
                footer=f"{self.scale} scale; for each D / L the mean over seeds at the best H / L",
            )
        grids = (self._grid(table), *unfinished(table))
        return Report("Shape at fixed compute", tuple(lines), grids, figures)

    def _grid(self, table: Table) -> Grid:
        rows = []
        for width, heads in product(self.widths_per_layer, self.heads_per_layer):
            shape = shaped(self.num_parameters, width, heads)
            losses = {arm: by_seed(table, "main", arm, _setting(width, heads)) for arm in ARMS}
            rows.append(
                (
                    f"{width:g}",
                    f"{heads:g}",
                    f"{shape.num_layers} x {shape.width}, {shape.num_heads} heads, {shape.num_parameters:,}",
                    *map(mean_of, losses.values()),
                    *gaps(losses),
                )
            )
        header = ("D / L", "H / L", "L x D, H, parameters", *ARMS, *gaps_header(ARMS))
        return Grid("Validation loss, nats a token", header, tuple(rows))

    def _losses(self, table: Table, arm: str) -> dict[tuple[float, float], float]:
        grid = product(self.widths_per_layer, self.heads_per_layer)
        found = {place: by_seed(table, "main", arm, _setting(*place)) for place in grid}
        return {place: mean(losses.values()) for place, losses in found.items() if losses}

    def _best(self, table: Table, arm: str) -> str:
        losses = self._losses(table, arm)
        if len(losses) < len(self.widths_per_layer) * len(self.heads_per_layer):
            return ""
        width, heads = min(losses, key=lambda place: losses[place])
        return f"D / L = {width:g}, H / L = {heads:g}"

    def _curves(self, table: Table) -> dict[str, list[tuple[float, float]]]:
        curves = {}
        for arm in ARMS:
            losses = self._losses(table, arm)
            points = []
            for width in self.widths_per_layer:
                own = [loss for (one, _), loss in losses.items() if one == width]
                points += [(width, min(own))] if own else []
            if points:
                curves[arm] = points
        return curves


def _setting(width_per_layer: float, heads_per_layer: float) -> str:
    return f"D/L {width_per_layer:g}, H/L {heads_per_layer:g}"

"""Depth retrieval: tasks in which an early result has to be found late, and the effect should be large."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import ClassVar

from attention_residuals.data.synthetic.binding import BindingDocuments, BindingItems, binding_tokenizer
from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.comparing import by_seed, gaps, gaps_header, plus_minus, unfinished
from attention_residuals.experiments.experiment import Experiment, Grid, Report, Scale, unknown_scale
from attention_residuals.experiments.measures import Answers
from attention_residuals.experiments.recipe import Recipe
from attention_residuals.experiments.recipes import LAPTOP, MAIN_ARMS, SMOKE, main_arms
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.plots import curve_plot

__all__ = ["DepthRetrieval"]

TASKS = {"binding": 1, "recall": 4}
"""How many colours each task has: k-hop binding has one, early-feature recall several."""


@dataclass(frozen=True, kw_only=True)
class DepthRetrieval(Experiment):
    """k-hop variable binding and early-feature recall, asked for with numbers of hops that training never asks for.

    Args:
        recipe: Of all runs, but for the sequence length, which is that of a text.
        documents: Training texts of the binding task; recall has the same, with colours.
        number: Items asked for each number of hops.
    """

    question: ClassVar[str] = "Does attention over depth find in late layers what early ones have made?"

    recipe: Recipe
    documents: BindingDocuments
    number: int = 500

    @classmethod
    def at(cls, scale: Scale) -> "DepthRetrieval":
        """Returns the study at a scale.

        Raises:
            ConfigError: The paper has no such study.
        """
        if scale == "paper":
            raise unknown_scale("depth-retrieval", scale, ("smoke", "laptop"))
        if scale == "laptop":
            return cls(scale=scale, recipe=LAPTOP, documents=BindingDocuments(num_documents=50_000))
        documents = BindingDocuments(
            num_documents=60, num_chains=2, chain_length=3, trained_hops=(1, 2), num_questions=2
        )
        return cls(scale=scale, recipe=SMOKE, documents=documents, number=60, seeds=(0, 1))

    def task(self, name: str) -> BindingDocuments:
        """Returns the training texts of a task."""
        return replace(self.documents, num_colours=TASKS[name])

    def items(self, name: str) -> BindingItems:
        """Returns what a task asks for."""
        task = self.task(name)
        return BindingItems(
            num_chains=task.num_chains,
            chain_length=task.chain_length,
            num_values=task.num_values,
            num_colours=task.num_colours,
            seed=task.seed,
        )

    def texts(self) -> Mapping[str, Text]:
        """Returns the texts of both tasks."""
        found = {}
        for name in TASKS:
            task = self.task(name)
            found[name] = Text(task, tokenizer=binding_tokenizer(task.num_values, task.num_colours))
        return found

    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists all runs, seed by seed."""
        length = self.documents.document_length
        recipe = replace(self.recipe, sequence_length=length)
        hops = tuple(range(1, self.documents.chain_length + 1))
        return tuple(
            Cell(
                stage=name,
                arm=arm,
                setting="",
                text=name,
                train=recipe.train_config(rule, seed=seed, vocab_size=vocab_sizes[name]),
                measure=Answers(items=self.items(name), hops=hops, number=self.number),
            )
            for seed in self.seeds
            for name in TASKS
            for arm, rule in main_arms(recipe.shape.num_layers).items()
        )

    def report(self, table: Table) -> Report:
        """Shows accuracies by hops, beside chance."""
        trained = self.documents.trained_hops
        lines = [
            f"Question: {self.question}",
            f"Scale: {self.scale}. An answer is the likeliest of the candidates. Training asks for {trained} hops; "
            "others are held out. The paper has no such study.",
        ]
        grids, figures = [], {}
        for name in TASKS:
            grids.append(self._grid(table, name))
            curves = self._curves(table, name)
            if curves:
                figures[name] = curve_plot(
                    curves,
                    x_label=f"hops (trained: {', '.join(map(str, trained))})",
                    y_label="share of right answers",
                    title=f"Depth retrieval: {name}",
                    footer=f"{self.scale} scale; mean of the seeds; {self.number} items for each number of hops",
                )
        return Report("Depth retrieval", tuple(lines), (*grids, *unfinished(table)), figures)

    def _grid(self, table: Table, name: str) -> Grid:
        rows = []
        for hops in range(1, self.documents.chain_length + 1):
            right = {arm: by_seed(table, name, arm, quantity=_Right(hops)) for arm in MAIN_ARMS}
            held_out = "" if hops in self.documents.trained_hops else ", held out"
            rows.append((f"{hops}{held_out}", *map(plus_minus, right.values()), *gaps(right)))
        title = f"Share of right answers, {name}; chance {self.items(name).chance:.4g}"
        header = ("hops", *(f"{arm} [95 %]" for arm in MAIN_ARMS), *gaps_header(MAIN_ARMS))
        return Grid(title, header, tuple(rows))

    def _curves(self, table: Table, name: str) -> dict[str, list[tuple[float, float]]]:
        every = range(1, self.documents.chain_length + 1)
        curves: dict[str, list[tuple[float, float]]] = {}
        for arm in MAIN_ARMS:
            runs = list(table.done(name, arm).values())
            if runs:
                curves[arm] = [(float(hops), mean(_Right(hops)(run) for run in runs)) for hops in every]
        if curves:
            chance = self.items(name).chance
            curves["chance"] = [(float(hops), chance) for hops in every]
        return curves


@dataclass(frozen=True)
class _Right:
    """Reads the share of right answers of an outcome."""

    hops: int

    def __call__(self, outcome: Outcome) -> float:
        return outcome.value("accuracy", place=self.hops)

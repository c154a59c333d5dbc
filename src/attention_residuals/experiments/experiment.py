"""What a study is: a question, texts, runs, and a report that is made of the file of results alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from matplotlib.figure import Figure

from attention_residuals.durable import write_bytes
from attention_residuals.errors import ConfigError, is_count, nearest
from attention_residuals.experiments.cell import Cell, Text
from attention_residuals.experiments.results import Table
from attention_residuals.plots import png_bytes

__all__ = ["SCALES", "Experiment", "Grid", "Report", "Scale", "unknown_scale", "write_report"]

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
"""smoke tries the machinery in seconds, and its numbers mean nothing; paper is the paper's own size."""


class Grid(NamedTuple):
    """A table of a report."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Writes it as Markdown.

        Example:
            >>> print(Grid("Losses", ("arm", "nats"), (("block", "3.1"),)).markdown())
            ### Losses
            <BLANKLINE>
            | arm | nats |
            |---|---|
            | block | 3.1 |
        """
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        drawn = ["| " + " | ".join(line) + " |" for line in lines]
        drawn[1] = drawn[1].replace(" ", "")
        return "\n".join((f"### {self.title}", "", *drawn))


class Report(NamedTuple):
    """What a file of results says."""

    title: str
    lines: tuple[str, ...]
    """Sentences above the tables."""
    grids: tuple[Grid, ...]
    figures: Mapping[str, Figure]

    def markdown(self) -> str:
        """Writes it as Markdown, figures by the names of their files."""
        pictures = [f"![{name}]({name}.png)" for name in self.figures]
        parts = [f"# {self.title}", *self.lines, *(grid.markdown() for grid in self.grids), *pictures]
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """One study at one scale; base of frozen dataclasses.

    Args:
        scale: Decides text and budget.
        seeds: Of the weights and the order of the data, the same for all arms.
    """

    question: ClassVar[str]

    scale: Scale
    seeds: tuple[int, ...] = (0, 1, 2)

    @classmethod
    @abstractmethod
    def at(cls, scale: Scale) -> "Experiment":
        """Returns the study at a scale.

        Raises:
            ConfigError: There is no such scale of it.
        """

    @abstractmethod
    def texts(self) -> Mapping[str, Text]:
        """Returns what runs are trained on, by name."""

    @abstractmethod
    def cells(self, vocab_sizes: Mapping[str, int], table: Table) -> tuple[Cell, ...]:
        """Lists the runs that can be told by now, in the order in which they are to be done.

        Args:
            vocab_sizes: Of the texts.
            table: The outcomes so far; later runs may depend on them.
        """

    def with_seeds(self, number: int) -> "Experiment":
        """Returns the study with seeds 0 to ``number`` - 1; what other seeds have found stays in the file of results.

        Raises:
            ConfigError: Fewer than one.
        """
        if not is_count(number):
            raise ConfigError(got=f"{number} seeds", expected="1 or more", do="3 give a first interval")
        return replace(self, seeds=tuple(range(number)))

    def foreseen(self, vocab_sizes: Mapping[str, int]) -> tuple[Cell, ...]:
        """Lists all runs, for what they cost; those that depend on others as they are most likely to be."""
        return self.cells(vocab_sizes, Table({}))

    @abstractmethod
    def report(self, table: Table) -> Report:
        """Makes tables and figures of the outcomes so far, however few."""


def write_report(report: Report, folder: Path) -> Path:
    """Writes report.md and the figures as PNG, in place of those of an earlier call.

    Args:
        report: What to write.
        folder: Is made if it does not exist.

    Returns:
        The path of report.md.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in report.figures.items():
        write_bytes(folder / f"{name}.png", png_bytes(figure))
    path = folder / "report.md"
    write_bytes(path, report.markdown().encode())
    return path


def unknown_scale(name: str, scale: str, known: Sequence[str]) -> ConfigError:
    """Makes the error of a scale that a study does not have."""
    return ConfigError(
        got=f"--scale {scale} of the study {name}", expected=" or ".join(known), do=nearest(scale, known)
    )

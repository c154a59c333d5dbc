"""Arms beside a baseline: differences paired by seed, their intervals, and how many seeds would show an effect."""

from collections.abc import Callable, Iterable, Mapping
from statistics import mean
from typing import NamedTuple

from attention_residuals.errors import ConfigError
from attention_residuals.experiments.experiment import Grid
from attention_residuals.experiments.results import Outcome, Table
from attention_residuals.stats import Interval, needed_seeds, seed_interval

__all__ = [
    "WANTED",
    "Difference",
    "at_end",
    "by_seed",
    "difference",
    "final_loss",
    "gaps",
    "gaps_header",
    "mean_of",
    "plus_minus",
    "unfinished",
]

WANTED = 0.02
"""The gain in nats a token that a study should be able to show: the smaller of the paper's at its sizes."""


class Difference(NamedTuple):
    """An arm less the baseline, over the seeds that both have."""

    seeds: tuple[int, ...]
    mean: float | None
    """None where they share no seed."""
    interval: Interval | None
    """Student's, of 95 %; None for fewer than 2 seeds."""
    needed: int | None
    """Seeds that find ``WANTED`` with power 0.8, by the spread of these; None where it cannot be told."""

    def told(self) -> str:
        """Writes the difference with its interval, for a table."""
        if self.mean is None:
            return "-"
        if self.interval is None:
            return f"{self.mean:+.4f} (1 seed)"
        return f"{self.interval.estimate:+.4f} [{self.interval.low:+.4f}, {self.interval.high:+.4f}]"


def final_loss(outcome: Outcome) -> float:
    """Returns the validation loss at the end, nats a token."""
    return outcome.value("validation loss")


def at_end(outcome: Outcome, quantity: str) -> dict[int, float]:
    """Returns a quantity as it is after the last step, by its place."""
    return outcome.series(quantity, step=max(outcome.series("validation loss")))


def by_seed(
    table: Table,
    stage: str,
    arm: str,
    setting: str | None = None,
    quantity: Callable[[Outcome], float] = final_loss,
) -> dict[int, float]:
    """Returns a number of each finished run of an arm, by seed.

    Args:
        table: The outcomes.
        stage: Of the runs.
        arm: Of the runs.
        setting: Of the runs; None takes any, of which each seed must have one.
        quantity: Reads the number of an outcome.
    """
    return {key.seed: quantity(outcome) for key, outcome in table.done(stage, arm, setting).items()}


def difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Subtracts the baseline seed by seed.

    Args:
        arm: A number for each seed.
        baseline: Likewise; seeds that only one of them has are left out.

    Example:
        >>> found = difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 2.5, 1: 3.25, 2: 4.5, 3: 9.0})
        >>> found.seeds, round(found.mean, 3), found.told()
        ((0, 1, 2), -0.417, '-0.4167 [-0.7752, -0.0581]')
    """
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    gaps = [arm[seed] - baseline[seed] for seed in seeds]
    if not gaps:
        return Difference(seeds, None, None, None)
    if len(gaps) < 2:
        return Difference(seeds, gaps[0], None, None)
    try:
        needed = needed_seeds(gaps, WANTED)
    except ConfigError:  # they do not vary, or so much that no number of seeds will do
        needed = None
    return Difference(seeds, mean(gaps), seed_interval(gaps), needed)


def gaps_header(arms: Iterable[str]) -> tuple[str, ...]:
    """Heads the columns that ``gaps`` fills.

    Example:
        >>> gaps_header(("standard", "block"))
        ('block less standard [95 %]',)
    """
    return tuple(f"{arm} less standard [95 %]" for arm in arms if arm != "standard")


def gaps(numbers: Mapping[str, Mapping[int, float]]) -> tuple[str, ...]:
    """Writes what every other arm is beside the standard model, for a table.

    Args:
        numbers: By arm, a number for each seed.

    Example:
        >>> gaps({"standard": {0: 2.0}, "block": {0: 1.5}})
        ('-0.5000 (1 seed)',)
    """
    base = numbers["standard"]
    return tuple(difference(own, base).told() for arm, own in numbers.items() if arm != "standard")


def mean_of(numbers: Mapping[int, float]) -> str:
    """Writes the mean over seeds for a table.

    Example:
        >>> mean_of({0: 1.0, 1: 2.0}), mean_of({})
        ('1.5000', '-')
    """
    return f"{mean(numbers.values()):.4f}" if numbers else "-"


def plus_minus(numbers: Mapping[int, float], form: str = ".3f") -> str:
    """Writes the mean over seeds with its interval, where there are 2 seeds or more.

    Args:
        numbers: By seed.
        form: Of each number, as ``format`` takes it.

    Example:
        >>> plus_minus({0: 1.0, 1: 2.0, 2: 3.0}), plus_minus({0: 1.0}, "+.1f")
        ('2.000 [-0.484, 4.484]', '+1.0 (1 seed)')
    """
    if len(numbers) < 2:
        return f"{mean(numbers.values()):{form}} (1 seed)" if numbers else "-"
    found = seed_interval(list(numbers.values()))
    return f"{found.estimate:{form}} [{found.low:{form}}, {found.high:{form}}]"


def unfinished(table: Table) -> tuple[Grid, ...]:
    """Lists the runs that have ended without numbers; nothing where there are none."""
    rows = tuple(
        (str(key), outcome.status.replace("|", "/"))
        for key, outcome in table.outcomes.items()
        if not outcome.is_done
    )
    return (Grid("Runs without a result", ("run", "why"), rows),) if rows else ()

"""Learning-rate schedules: the fraction of the peak at each step, a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

from attention_residuals.errors import ConfigError, is_count

__all__ = ["WSD", "Cosine", "Segment", "Segments"]


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up to the peak, then half a cosine down to the last step.

    Args:
        warmup_steps: Steps until the peak, >= 0.
        final_fraction: Share of the peak at the last step, 0 to 1.

    Raises:
        ConfigError: A value out of range.

    Source:
        Loshchilov and Hutter, arXiv:1608.03983.

    Example:
        >>> schedule = Cosine(warmup_steps=2, final_fraction=0.0)
        >>> [round(schedule.fraction(step, num_steps=4), 6) for step in (1, 2, 3, 4)]
        [0.5, 1.0, 0.5, 0.0]
    """

    warmup_steps: int = 0
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        _check(self, "warmup_steps")

    @property
    def least_steps(self) -> int:
        """The shortest run that the schedule fits into."""
        return max(1, self.warmup_steps)

    def fraction(self, step: int, num_steps: int) -> float:
        """Returns the share of the peak, 0 to 1.

        Args:
            step: The optimizer step, 1 to ``num_steps``.
            num_steps: Of the whole run, at least ``least_steps``.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps) / (num_steps - self.warmup_steps)
        return self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Linear warm-up, a stable peak, and a linear decay over the last steps.

    Args:
        warmup_steps: Steps until the peak, >= 0.
        decay_steps: Steps from the peak to the end, >= 0.
        final_fraction: Share of the peak at the last step, 0 to 1.

    Raises:
        ConfigError: A value out of range.

    Source:
        Hu et al. (MiniCPM), arXiv:2404.06395.

    Example:
        >>> schedule = WSD(warmup_steps=1, decay_steps=2, final_fraction=0.0)
        >>> [schedule.fraction(step, num_steps=5) for step in (1, 2, 3, 4, 5)]
        [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    warmup_steps: int = 0
    decay_steps: int
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        _check(self, "warmup_steps", "decay_steps")

    @property
    def least_steps(self) -> int:
        """The shortest run that the schedule fits into."""
        return max(1, self.warmup_steps + self.decay_steps)

    def fraction(self, step: int, num_steps: int) -> float:
        """Returns the share of the peak, 0 to 1.

        Args:
            step: The optimizer step, 1 to ``num_steps``.
            num_steps: Of the whole run, at least ``least_steps``.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        left = num_steps - step
        if left >= self.decay_steps:
            return 1.0
        return self.final_fraction + (1 - self.final_fraction) * left / self.decay_steps


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a run, in which the learning rate goes from where it is to another share of the peak.

    Args:
        num_steps: Its length, 1 or more.
        end: The share of the peak at its last step, 0 to 1; the one before it to stay there.
        shape: A straight line, or half a cosine.

    Raises:
        ConfigError: A value out of range.
    """

    num_steps: int
    end: float
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if not is_count(self.num_steps) or not 0 <= self.end <= 1 or self.shape not in ("linear", "cosine"):
            raise ConfigError(
                got=str(self),
                expected="1 step or more, a share of the peak from 0 to 1, 'linear' or 'cosine'",
                do="Segment(num_steps=100, end=1.0) rises to the peak in 100 steps",
            )


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Parts behind each other: warm-up, stable, decay, and then those of a mid-training.

    Behind the last part the learning rate stays where it is.

    Args:
        parts: In order, one or more; the first begins at 0.

    Raises:
        ConfigError: No parts.

    Example:
        >>> pretraining = (Segment(num_steps=2, end=1.0), Segment(num_steps=3, end=1.0), Segment(num_steps=2, end=0.1))
        >>> midtraining = (Segment(num_steps=1, end=0.4), Segment(num_steps=2, end=0.0))
        >>> schedule = Segments(parts=(*pretraining, *midtraining))
        >>> [round(schedule.fraction(step, schedule.least_steps), 2) for step in range(1, 11)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1, 0.4, 0.2, 0.0]
    """

    parts: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.parts or not all(isinstance(part, Segment) for part in self.parts):
            raise ConfigError(
                got=f"parts={self.parts!r}", expected="one Segment or more", do="begin with a warm-up"
            )

    @property
    def least_steps(self) -> int:
        """The shortest run that the schedule fits into: all of its parts."""
        return sum(part.num_steps for part in self.parts)

    def fraction(self, step: int, num_steps: int) -> float:
        """Returns the share of the peak, 0 to 1.

        Args:
            step: The optimizer step, 1 to ``num_steps``.
            num_steps: Of the whole run, at least ``least_steps``.
        """
        share = 0.0
        for part in self.parts:
            if step < part.num_steps:
                progress = step / part.num_steps
                if part.shape == "cosine":
                    progress = (1 - math.cos(math.pi * progress)) / 2
                return share + (part.end - share) * progress
            step, share = step - part.num_steps, part.end
        return share


def _check(schedule: Cosine | WSD, *names: str) -> None:
    counts = [getattr(schedule, name) for name in names]
    whole = all(type(count) is int and count >= 0 for count in counts)
    if not whole or not 0 <= schedule.final_fraction <= 1:
        raise ConfigError(
            got=str(schedule),
            expected="whole numbers of steps >= 0 and a fraction of the peak from 0 to 1",
            do="a warm-up of 1 to 5 % of the run is usual",
        )

"""Learning-rate schedules: the fraction of the peak at each step, a pure function of the step."""

import math
from dataclasses import dataclass

from attention_residuals.errors import ConfigError

__all__ = ["WSD", "Cosine"]


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


def _check(schedule: Cosine | WSD, *names: str) -> None:
    counts = [getattr(schedule, name) for name in names]
    whole = all(type(count) is int and count >= 0 for count in counts)
    if not whole or not 0 <= schedule.final_fraction <= 1:
        raise ConfigError(
            got=str(schedule),
            expected="whole numbers of steps >= 0 and a fraction of the peak from 0 to 1",
            do="a warm-up of 1 to 5 % of the run is usual",
        )

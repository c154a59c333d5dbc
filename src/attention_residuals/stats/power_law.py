"""How loss falls with compute: L = A C^-alpha, and how much compute one model saves over another."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats.bootstrap import Interval
from attention_residuals.stats.units import one_row

__all__ = ["PowerLaw", "compute_multiplier", "power_law"]


class PowerLaw(NamedTuple):
    """The fit of L = A C^-alpha, a straight line in the logarithms of both.

    Intervals are Student's, of a regression that takes the law as true and the points as independent: they hold for
    neither where a bend is visible or points share their seed.
    """

    scale: Interval
    """A, the loss at C = 1, in the unit of the losses."""
    exponent: Interval
    """alpha; above 0 where more compute lowers the loss."""
    residual: float
    """Standard deviation of the points about the line, in the logarithm of the loss: 0.01 is 1 % of the loss."""

    def loss(self, compute: float) -> float:
        """Reads the loss off the fit.

        Args:
            compute: C, > 0, in the unit of the fit.
        """
        return float(self.scale.estimate * compute**-self.exponent.estimate)


def power_law(compute: npt.ArrayLike, losses: npt.ArrayLike, *, level: float = 0.95) -> PowerLaw:
    """Fits L = A C^-alpha by least squares in the logarithms.

    Args:
        compute: C of each point, > 0, of 2 different sizes or more. A is the loss at 1 of its unit.
        losses: L of each, > 0.
        level: Of the intervals, between 0 and 1.

    Returns:
        The fit; with 2 points its intervals are infinite, since nothing is left to tell the spread from.

    Raises:
        ShapeError: Other than one row of 2 points or more, or fewer than 2 sizes.
        NonFiniteError: A number is NaN or infinite.
        ConfigError: A number that is not above 0, or level out of range.

    Source:
        Attention Residuals (arXiv:2603.15031), Fig. 4.

    Example:
        >>> fit = power_law([1.0, 4.0, 16.0], [2.0, 1.0, 0.5])
        >>> round(fit.scale.estimate, 6), round(fit.exponent.estimate, 6)
        (2.0, 0.5)
    """
    x, y = one_row(compute, least=2), one_row(losses, least=2)
    if x.shape != y.shape or len(np.unique(x)) < 2:
        raise ShapeError(
            got=f"{len(x)} amounts of compute, {len(np.unique(x))} different, and {len(y)} losses",
            expected="one loss for each amount, and two different amounts or more",
            do="measure at several sizes",
        )
    if not ((x > 0).all() and (y > 0).all() and 0 < level < 1):
        raise ConfigError(
            got=f"compute from {x.min():g}, losses from {y.min():g}, level={level}",
            expected="numbers above 0, 0 < level < 1",
            do="pass losses in nats, and level=0.95",
        )
    x, y = np.log(x), np.log(y)
    centred = x - x.mean()
    squares = float((centred**2).sum())
    slope = float((centred * y).sum() / squares)
    start = float(y.mean() - slope * x.mean())
    freedom = len(x) - 2
    rest = float(((y - start - slope * x) ** 2).sum())
    spread = np.sqrt(rest / freedom) if freedom else np.inf
    reach = float(stdtrit(freedom, (1 + level) / 2)) * spread if freedom else np.inf
    slope_reach = reach / np.sqrt(squares)
    start_reach = reach * np.sqrt(1 / len(x) + x.mean() ** 2 / squares)
    reaches = (0.0, -start_reach, start_reach)
    scale = Interval(*(float(np.exp(start + one)) for one in reaches))
    exponent = Interval(-slope, float(-slope - slope_reach), float(-slope + slope_reach))
    return PowerLaw(scale, exponent, float(spread))


def compute_multiplier(baseline: PowerLaw, other: PowerLaw, compute: float) -> float:
    """Says how many times the compute a baseline would need for the loss that another model has.

    Args:
        baseline: Its fit.
        other: The fit of what is compared with it.
        compute: Of the other model, > 0, in the unit of both fits. Where the exponents differ, the answer depends on
            it, and beyond the fitted range it is a guess.

    Returns:
        Above 1 where the other model is better.

    Raises:
        ConfigError: compute is not above 0, or the baseline's loss does not fall.

    Example:
        >>> def law(scale, exponent):
        ...     return PowerLaw(Interval(scale, scale, scale), Interval(exponent, exponent, exponent), 0.0)
        >>> paper = law(1.891, 0.057), law(1.870, 0.058)  # standard, Block
        >>> [round(compute_multiplier(*paper, compute), 3) for compute in (0.5, 1.0, 5.6)]
        [1.202, 1.216, 1.254]
    """
    if not compute > 0 or not baseline.exponent.estimate > 0:
        raise ConfigError(
            got=f"compute={compute}, a baseline with alpha={baseline.exponent.estimate:g}",
            expected="both above 0",
            do="fit a baseline that gains from compute",
        )
    needed = (baseline.scale.estimate / other.loss(compute)) ** (1 / baseline.exponent.estimate)
    return float(needed / compute)

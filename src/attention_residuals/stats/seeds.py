"""A few models trained from different seeds: what they say together.

A percentile bootstrap of 3 seeds is no interval of 95 %. It draws the same 3 numbers again, so its means
have a spread that is too small by the factor sqrt(2/3), and with 27 draws it cannot reach beyond the smallest
and the largest seed, which hold the truth between them in 75 % of all cases (1 - 2 / 2**3), and no more. Student's
t knows that a spread of 3 numbers is itself a guess.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats.bootstrap import Interval
from attention_residuals.stats.power import needed_items
from attention_residuals.stats.units import Numbers, one_row

__all__ = ["RandomEffects", "needed_seeds", "random_effects", "seed_interval", "sign_agreement"]


class RandomEffects(NamedTuple):
    """The mean over models, and how far models differ beyond what their items explain.

    ``spread`` is the standard deviation of true effects between models (tau), 0 where there is no sign of any.
    """

    mean: float
    low: float
    high: float
    spread: float
    num_models: int


def seed_interval(effects: npt.ArrayLike, *, level: float = 0.95) -> Interval:
    """Gives Student's interval for the mean over models.

    Args:
        effects: One for each model, 2 or more.
        level: Of the interval, between 0 and 1.

    Raises:
        ShapeError: Other than one row of 2 effects or more.
        NonFiniteError: An effect is NaN or infinite.
        ConfigError: level is out of range.

    Example:
        >>> seed_interval([1.0, 2.0, 3.0]).high.__round__(2)
        4.48
    """
    row = one_row(effects, least=2)
    reach = _quantile(len(row) - 1, level) * row.std(ddof=1) / np.sqrt(len(row))
    return Interval(float(row.mean()), float(row.mean() - reach), float(row.mean() + reach))


def needed_seeds(
    differences: npt.ArrayLike, effect: float, *, power: float = 0.8, alpha: float = 0.05
) -> int:
    """Says how many seeds show an effect in differences that are paired by seed, from those of a pilot.

    The pilot's spread is a guess from few seeds, and may be half or twice the true one; so is the answer.

    Args:
        differences: Of a pilot, one for each seed, 2 or more, not all the same.
        effect: That should be found, in the unit of the differences, not 0.
        power: Wanted chance of finding it, between alpha and 1.
        alpha: Rate of false alarms.

    Raises:
        ShapeError: Other than one row of 2 differences or more.
        NonFiniteError: A difference is NaN or infinite.
        ConfigError: All differences are the same, or a number out of range.

    Example:
        >>> needed_seeds([0.010, 0.025, 0.031], effect=0.02)
        5
    """
    spread = float(one_row(differences, least=2).std(ddof=1))
    if not spread > 0:
        raise ConfigError(
            got="differences that are all the same",
            expected="differences that vary from seed to seed",
            do="measure a pilot of 3 seeds or more",
        )
    return needed_items(effect / spread, power=power, alpha=alpha)


def sign_agreement(effects: npt.ArrayLike) -> float:
    """Gives the share of models whose effect has the sign of the mean effect.

    Args:
        effects: One for each model.

    Returns:
        0 to 1; 1 where all agree. An effect of 0 agrees with none.

    Raises:
        ShapeError: Other than one row.
        NonFiniteError: An effect is NaN or infinite.

    Example:
        >>> sign_agreement([0.2, 0.1, -0.1, 0.3])
        0.75
    """
    row = one_row(effects, least=1)
    return float((np.sign(row) * np.sign(row.mean()) > 0).mean())


def random_effects(effects: npt.ArrayLike, errors: npt.ArrayLike, *, level: float = 0.95) -> RandomEffects:
    """Gives the mean of effects that differ from model to model, by how well each is known.

    Between models the spread is estimated as by DerSimonian and Laird, and the interval is that of Hartung and
    Knapp, which uses Student's t and so holds for few models.

    Args:
        effects: One for each model, 2 or more.
        errors: Standard error of each over its items, > 0.
        level: Of the interval, between 0 and 1.

    Raises:
        ShapeError: Other than one row of 2 effects or more, or other than one error for each.
        NonFiniteError: A number is NaN or infinite.
        ConfigError: An error is not above 0, or level is out of range.

    Source:
        DerSimonian and Laird, Control. Clin. Trials 7 (1986); Hartung and Knapp, Stat. Med. 20 (2001).

    Example:
        >>> found = random_effects([0.2, 0.3, 0.25], [0.1, 0.1, 0.1])
        >>> round(found.mean, 2), found.spread
        (0.25, 0.0)
    """
    row, error = one_row(effects, least=2), one_row(errors, least=2)
    if row.shape != error.shape:
        raise ShapeError(
            got=f"{len(row)} effects and {len(error)} errors",
            expected="one error for each effect",
            do="pass the standard error over the items of each model",
        )
    if not (error > 0).all():
        raise ConfigError(
            got=f"an error of {error.min():g}",
            expected="errors above 0",
            do="pass the standard error over the items of each model",
        )
    spread = _spread(row, error)
    weights = 1 / (error**2 + spread**2)
    weights = weights / weights.sum()
    mean = (weights * row).sum()
    reach = _quantile(len(row) - 1, level) * np.sqrt((weights * (row - mean) ** 2).sum() / (len(row) - 1))
    return RandomEffects(float(mean), float(mean - reach), float(mean + reach), spread, len(row))


def _spread(row: Numbers, error: Numbers) -> float:
    weights = 1 / error**2
    total = weights.sum()
    mean = (weights * row).sum() / total
    excess = (weights * (row - mean) ** 2).sum() - (len(row) - 1)
    return float(np.sqrt(max(0.0, excess / (total - (weights**2).sum() / total))))


def _quantile(df: int, level: float) -> float:
    if not 0 < level < 1:
        raise ConfigError(got=f"level={level}", expected="0 < level < 1", do="pass 0.95")
    return float(stdtrit(df, (1 + level) / 2))

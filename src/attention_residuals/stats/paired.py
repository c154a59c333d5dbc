"""Paired tests with the item as the unit: sign flips, and how large an effect is.

Distances such as the Jensen-Shannon divergence are never below 0, so a test of one against 0 finds noise:
test signed effects.

Example:
    >>> from attention_residuals.stats.units import crossed_effects
    >>> measured = np.array([[[0.1, 0.3], [0.4, 0.1]]] * 6) + np.linspace(0, 0.1, 6)[:, None, None]
    >>> effects = crossed_effects(measured)
    >>> sign_flip(effects).p  # 2 of 64 flips are as far from 0
    0.03125
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import nctdtrinc, stdtrit

from attention_residuals.errors import ConfigError, NonFiniteError, is_count
from attention_residuals.stats.units import cluster_sums, one_row

__all__ = ["EffectSize", "SignFlip", "effect_size", "flip_p", "flipped_sums", "sign_flip"]

Numbers = npt.NDArray[np.float64]

_AT_ONCE = 2**20  # signs drawn at a time: 8 MB


class SignFlip(NamedTuple):
    """What a sign-flip test found.

    ``p`` is two-sided, above 0 to 1. ``smallest_p`` is what it could have been at least: with few items or
    clusters no effect, however large, gets below it. ``is_exact`` where every flip was counted.
    """

    effect: float
    p: float
    smallest_p: float
    num_units: int
    is_exact: bool


class EffectSize(NamedTuple):
    """A mean effect in its own unit, and in standard deviations of the items (dz), each with an interval."""

    raw: float
    raw_low: float
    raw_high: float
    dz: float
    dz_low: float
    dz_high: float
    num_items: int


def sign_flip(
    effects: npt.ArrayLike,
    *,
    clusters: npt.ArrayLike | None = None,
    num_flips: int = 10_000,
    seed: int = 0,
) -> SignFlip:
    """Tests whether effects are symmetric around 0, by turning the signs of whole items or clusters.

    Without an effect, a mismatch could as well have been called the match. The test counts how often a sum
    with signs turned at random is as far from 0 as the one that was measured.

    Args:
        effects: One for each item.
        clusters: Which cluster, such as a template, each item belongs to. Clusters are then turned as a
            whole, which holds where items of a cluster share an effect of their own.
        num_flips: How many ways to turn signs, >= 1; all of them where there are no more than that.
        seed: Of the random signs, >= 0.

    Raises:
        ShapeError: Other than one row of effects, or other than one cluster for each.
        NonFiniteError: An effect is NaN or infinite.
        ConfigError: num_flips is below 1.

    Example:
        >>> sign_flip([1.0, 2.0, 3.0, 4.0, 5.0]).p
        0.0625
        >>> sign_flip([1.0, 2.0, 3.0, 4.0, 5.0], clusters=["a", "a", "b", "b", "b"]).p
        0.5
    """
    effects = one_row(effects, least=1)
    sums = effects if clusters is None else cluster_sums(effects, np.asarray(clusters))
    p, num_ways, is_exact = flip_p(sums[:, None], num_flips, seed)
    smallest = min(1.0, 2 / num_ways) if is_exact else 1 / (1 + num_ways)
    return SignFlip(float(effects.mean()), float(p[0]), smallest, len(sums), is_exact)


def flip_p(sums_IC: Numbers, num_flips: int, seed: int) -> tuple[Numbers, int, bool]:
    """Tests each column by itself: how often a sum with signs turned is as far from 0 as the measured one.

    Returns:
        p of each column, the number of ways that signs were turned, and whether these are all there are.

    Raises:
        ConfigError: num_flips is below 1.
    """
    turned, is_exact = flipped_sums(sums_IC, num_flips, seed)
    # Rounding must not decide about flips that are the measured one again.
    reached = (np.abs(turned) >= np.abs(sums_IC.sum(0)) - 1e-12 * np.abs(sums_IC).sum(0)).sum(0)
    p = reached / len(turned) if is_exact else (1 + reached) / (1 + len(turned))
    return np.asarray(p), len(turned), is_exact


def flipped_sums(sums_IC: Numbers, num_flips: int, seed: int) -> tuple[Numbers, bool]:
    """Sums up each column with signs turned, the same signs for all columns.

    Returns:
        One row for each way to turn the signs, and whether these are all the ways there are.

    Raises:
        ConfigError: num_flips is below 1.
    """
    if not is_count(num_flips):
        raise ConfigError(got=f"num_flips={num_flips}", expected="num_flips >= 1", do="pass 10_000")
    units = len(sums_IC)
    is_exact = units < 60 and 2**units <= num_flips
    if is_exact:
        ways = np.arange(2**units)[:, None] >> np.arange(units) & 1
        return (1.0 - 2.0 * ways) @ sums_IC, True
    rng, rows = np.random.default_rng(seed), max(1, _AT_ONCE // units)
    parts = []
    for first in range(0, num_flips, rows):
        ways = rng.integers(0, 2, size=(min(rows, num_flips - first), units), dtype=np.int8)
        parts.append((1.0 - 2.0 * ways) @ sums_IC)
    return np.concatenate(parts), False


def effect_size(effects: npt.ArrayLike, *, level: float = 0.95) -> EffectSize:
    """Says how large a mean effect is, in its unit and in standard deviations of the items.

    Both intervals take items for independent draws of a normal distribution: Student's for the mean, and for
    dz those values that give the measured t with the wanted chance. For other distributions and for
    clustered items see ``bootstrap``.

    Args:
        effects: One for each item, 3 or more, not all alike.
        level: Of the intervals, between 0 and 1.

    Raises:
        ShapeError: Other than one row of 3 effects or more.
        NonFiniteError: An effect is NaN or infinite, or all effects are the same.

    Example:
        >>> effect_size([0.1, 0.3, 0.2, 0.4]).dz.__round__(2)
        1.94
    """
    effects = one_row(effects, least=3)
    spread, count = effects.std(ddof=1), len(effects)
    if not spread > 1e-12 * np.abs(effects).max():
        raise NonFiniteError(
            got=f"{count} effects, all of them {effects[0]:g}",
            expected="effects that vary",
            do="report the effect itself: it has no spread to be measured in",
        )
    mean, error = float(effects.mean()), float(spread / np.sqrt(count))
    reach = float(stdtrit(count - 1, (1 + level) / 2)) * error
    t, tail = mean / error, (1 - level) / 2
    low, high = nctdtrinc(count - 1, [1 - tail, tail], t) / np.sqrt(count)  # where t or more has that chance
    return EffectSize(mean, mean - reach, mean + reach, mean / float(spread), float(low), float(high), count)

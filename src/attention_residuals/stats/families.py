"""Many cells at once: which of them may be claimed, and which share of a map's marks is false.

- ``max_t`` for claims about a single cell: under 5 % of studies claim any false one, however cells depend.
- ``benjamini_hochberg`` for maps: about 5 % of the marked cells are false, if cells depend positively or not
  at all. Weights that sum to 1 depend negatively: test their clr, or take ``benjamini_yekutieli``, which holds
  for every dependence and finds less.
"""

import numpy as np
import numpy.typing as npt

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.stats.paired import flipped_sums
from attention_residuals.stats.units import Numbers, cluster_sums, finite

__all__ = ["benjamini_hochberg", "benjamini_yekutieli", "max_t"]


def max_t(
    effects_IC: npt.ArrayLike,
    *,
    clusters: npt.ArrayLike | None = None,
    num_flips: int = 10_000,
    seed: int = 0,
) -> Numbers:
    """Tests each of many cells so that a false claim about any of them is rare (strong control).

    Signs are turned for whole items, so cells keep how they depend on each other. Each cell's t is compared
    with the largest t of any cell.

    Args:
        effects_IC: One row for each item, one column for each cell.
        clusters: Which cluster each item belongs to; see ``sign_flip``.
        num_flips: How many ways to turn signs, >= 1; all of them where there are no more than that.
        seed: Of the random signs, >= 0.

    Returns:
        For each cell, p in the whole family, above 0 to 1. A cell where nothing ever changes has 1.

    Raises:
        ShapeError: Other than rows of cells for 2 items or clusters or more.
        NonFiniteError: An effect is NaN or infinite.

    Source:
        Westfall and Young, Resampling-Based Multiple Testing (1993); single step.

    Example:
        >>> effects = np.random.default_rng(1).normal(size=(50, 3)) + [1.0, 0.0, 0.0]
        >>> (max_t(effects, num_flips=1000) < 0.05).tolist()
        [True, False, False]
    """
    effects = finite(effects_IC)
    sums = effects if clusters is None or effects.ndim != 2 else cluster_sums(effects, np.asarray(clusters))
    if sums.ndim != 2 or len(sums) < 2 or sums.shape[1] < 1:
        raise ShapeError(
            got=f"effects of shape {list(effects.shape)}",
            expected="[items, cells], with 2 items or clusters or more",
            do="lay the cells of each item out in one row",
        )
    # Turning signs leaves a cell's squares as they are, so its t grows with its sum over their root, in the
    # same way for all cells: the largest of the one is the largest of the other.
    squares = (sums**2).sum(axis=0)
    standard = sums / np.sqrt(np.where(squares > 0, squares, 1.0))
    turned, is_exact = flipped_sums(standard, num_flips, seed)
    largest = np.abs(turned).max(axis=1)
    # Rounding must not decide about flips that are the measured one again.
    reached = (largest[:, None] >= np.abs(standard.sum(axis=0)) * (1 - 1e-9)).sum(axis=0)
    p = reached / len(turned) if is_exact else (1 + reached) / (1 + len(turned))
    return np.asarray(np.where(squares > 0, p, 1.0))


def benjamini_hochberg(p: npt.ArrayLike) -> Numbers:
    """Turns p into q: marking all cells with q <= 0.05 makes about 5 % of the marks false.

    Args:
        p: Of each cell, 0 to 1, in any shape.

    Returns:
        q in the same shape, p to 1.

    Raises:
        ConfigError: A p that is no chance.

    Source:
        Benjamini and Hochberg, J. R. Stat. Soc. B 57 (1995).

    Example:
        >>> benjamini_hochberg([0.01, 0.04, 0.03]).round(3).tolist()
        [0.03, 0.04, 0.04]
    """
    chances = np.asarray(p, dtype=np.float64)
    if not ((chances >= 0) & (chances <= 1)).all():
        raise ConfigError(
            got=f"p from {chances.min():g} to {chances.max():g}",
            expected="0 <= p <= 1 in every cell",
            do="leave out cells that were not tested",
        )
    flat = chances.ravel()
    order = np.argsort(flat)[::-1]
    # A factor of 1 or more, so that no q is below its p by rounding.
    scaled = flat[order] * (len(flat) / np.arange(len(flat), 0, -1))
    q = np.empty_like(flat)
    q[order] = np.minimum.accumulate(scaled)
    return q.reshape(chances.shape)


def benjamini_yekutieli(p: npt.ArrayLike) -> Numbers:
    """Turns p into q as ``benjamini_hochberg`` does, for cells that depend on each other in any way.

    Args:
        p: Of each cell, 0 to 1, in any shape.

    Returns:
        q in the same shape, p to 1; larger than that of Benjamini and Hochberg.

    Raises:
        ConfigError: A p that is no chance.

    Source:
        Benjamini and Yekutieli, Ann. Stat. 29 (2001).

    Example:
        >>> benjamini_yekutieli([0.01, 0.04, 0.03]).round(3).tolist()
        [0.055, 0.073, 0.073]
    """
    q = benjamini_hochberg(p)
    return np.asarray(np.minimum(1.0, q * (1 / np.arange(1, q.size + 1)).sum()))

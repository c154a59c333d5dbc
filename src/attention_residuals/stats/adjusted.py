"""An effect beyond surprise, and the share of an effect that a patch restores."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.stats.bootstrap import Interval
from attention_residuals.stats.units import cluster_sums, one_row

__all__ = ["Ancova", "ancova", "restoration"]


class Ancova(NamedTuple):
    """What a contradiction does beyond what its surprise does.

    ``effect`` is the mean change of contradictions less that of other edits of the same surprisal, in the
    unit of the changes; ``slope`` is the change for each nat of surprisal, which all edits share.
    """

    effect: float
    low: float
    high: float
    p: float
    slope: float
    num_clusters: int


def ancova(
    changes: npt.ArrayLike,
    surprisals: npt.ArrayLike,
    is_contradiction: npt.ArrayLike,
    clusters: npt.ArrayLike,
    *,
    level: float = 0.95,
) -> Ancova:
    """Compares contradictions with other edits at equal surprisal (analysis of covariance).

    changes = constant + effect * is_contradiction + slope * surprisal, by least squares. Errors are robust to
    whatever edits of one cluster share, as the several edits of one item do, and t has one degree of freedom
    less than there are clusters; so at least about 30 clusters are wanted.

    It answers for surprisals that both kinds of edit reach: compare their ranges first.

    Args:
        changes: How much routing changed, one for each edit.
        surprisals: How much the edited token's surprisal changed, in nats.
        is_contradiction: Whether the edit made a contradiction.
        clusters: The item of each edit.
        level: Of the interval, between 0 and 1.

    Raises:
        ShapeError: Rows of different lengths, or fewer than 3 clusters.
        NonFiniteError: A number is NaN or infinite.
        ConfigError: One kind of edit only, surprisals that do not vary beside it, or level out of range.

    Source:
        Liang and Zeger, Biometrika 73 (1986), with the correction G (n - 1) / ((G - 1) (n - k)).

    Example:
        >>> surprisals, kinds = np.arange(12.0), np.arange(12) % 2 == 0
        >>> changes = 0.5 * surprisals + 2.0 * kinds + 0.01 * np.sin(surprisals)
        >>> round(ancova(changes, surprisals, kinds, np.arange(12) // 2).effect, 1)
        2.0
    """
    change, surprisal = one_row(changes, least=4), one_row(surprisals, least=4)
    kind, labels = np.asarray(is_contradiction, dtype=np.float64), np.asarray(clusters)
    shapes = [change.shape, surprisal.shape, kind.shape, labels.shape]
    if len(set(shapes)) > 1 or len(np.unique(labels)) < 3:
        raise ShapeError(
            got=f"rows of shapes {[list(shape) for shape in shapes]}, {len(np.unique(labels))} cluster(s)",
            expected="four rows of one length, 3 clusters or more",
            do="pass a change, a surprisal, a kind and an item for every edit",
        )
    terms = np.stack([np.ones_like(change), kind, surprisal - surprisal.mean()], axis=1)
    if np.linalg.matrix_rank(terms) < 3 or not 0 < level < 1:
        raise ConfigError(
            got=f"{int(kind.sum())} contradictions of {len(kind)} edits, level={level}",
            expected="edits of both kinds, surprisals that vary within them, 0 < level < 1",
            do="add surprise-matched edits (Item.rare) of several surprisals",
        )
    bread = np.linalg.inv(terms.T @ terms)
    found = bread @ terms.T @ change
    scores = cluster_sums(terms * (change - terms @ found)[:, None], labels)
    groups, count = len(scores), len(change)
    correction = groups / (groups - 1) * (count - 1) / (count - 3)
    error = float(np.sqrt(correction * (bread @ scores.T @ scores @ bread)[1, 1]))
    reach = float(stdtrit(groups - 1, (1 + level) / 2)) * error
    effect = float(found[1])
    p = 2 * float(stdtr(groups - 1, -abs(effect) / error)) if error > 0 else float(effect == 0)
    return Ancova(effect, effect - reach, effect + reach, p, float(found[2]), groups)


def restoration(restored: npt.ArrayLike, total: npt.ArrayLike, *, level: float = 0.95) -> Interval:
    """Gives the share of an effect that a patch brings back: mean restored over mean total, after Fieller.

    A mean of shares would be ruled by items whose total is near 0; a share of means is not. Its interval is
    finite only where the total effect is surely not 0, and anything else is refused.

    Args:
        restored: How far the patch moved each item's metric towards the other text's.
        total: How far apart the two texts' metrics are, for the same items.
        level: Of the interval, between 0 and 1.

    Returns:
        The share and its interval: 0 where the patch does nothing, 1 where it does all; outside of these
        where it does harm or more than all.

    Raises:
        ShapeError: Other than two rows of the same length, 3 items or more.
        NonFiniteError: The total effect is too near to 0, or a number is NaN or infinite.
        ConfigError: level is out of range.

    Source:
        Fieller, J. R. Stat. Soc. B 16 (1954).

    Example:
        >>> share = restoration([0.9, 1.1, 1.0, 1.2], [2.0, 2.1, 1.9, 2.2])
        >>> round(share.estimate, 2), share.low < 0.5 < share.high
        (0.51, True)
    """
    one, other = one_row(restored, least=3), one_row(total, least=3)
    if one.shape != other.shape:
        raise ShapeError(
            got=f"{len(one)} restored and {len(other)} total effects",
            expected="one of each for every item",
            do="measure both on the same items",
        )
    if not 0 < level < 1:
        raise ConfigError(got=f"level={level}", expected="0 < level < 1", do="pass 0.95")
    covariance = np.cov(one, other) / len(one)
    t = float(stdtrit(len(one) - 1, (1 + level) / 2))
    mean, whole = float(one.mean()), float(other.mean())
    # The interval holds all shares r for which mean - r * whole is not significantly different from 0.
    a = whole**2 - t**2 * covariance[1, 1]
    b = mean * whole - t**2 * covariance[0, 1]
    c = mean**2 - t**2 * covariance[0, 0]
    if not a > 0:
        reach = t * np.sqrt(covariance[1, 1])
        raise NonFiniteError(
            got=f"a total effect of {whole:g}, known to +- {reach:g}, which may be 0",
            expected="a total effect that is surely not 0: there is nothing to restore a share of",
            do="report the restored effect itself, or use more items",
        )
    half = float(np.sqrt(max(0.0, b**2 - a * c)))
    return Interval(mean / whole, float((b - half) / a), float((b + half) / a))

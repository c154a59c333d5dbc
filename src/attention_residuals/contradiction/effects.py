"""The study's one primary number, its test, and which reads and cells may be named after it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention_residuals.contradiction.measurement import Measured, middle_third
from attention_residuals.stats import (
    RandomEffects,
    benjamini_hochberg,
    benjamini_yekutieli,
    bootstrap,
    crossed_effects,
    effect_size,
    max_t,
    random_effects,
    seed_interval,
    sign_agreement,
    sign_flip,
)
from attention_residuals.stats.paired import flip_p
from attention_residuals.stats.units import Numbers, cluster_sums

__all__ = [
    "PRIMARY",
    "Cells",
    "Finding",
    "OverSeeds",
    "cell_tests",
    "design_effect",
    "finding",
    "over_seeds",
    "primary_effects",
    "primary_per_text",
]

PRIMARY = (
    "crossed effect (mismatches less matches) on the clr of the embedding, mean over the attention reads of the "
    "middle third of the layers, at the answer token"
)
"""The one number of the study, in nats."""


class Finding(NamedTuple):
    """An effect with its tests; p is of sign flips of whole clusters, the interval of a clustered bootstrap."""

    estimate: float
    low: float
    high: float
    p: float
    smallest_p: float
    item_p: float
    """Of sign flips of single items, which takes items of a template for independent."""
    dz: float
    num_items: int
    num_clusters: int


class OverSeeds(NamedTuple):
    """An effect over independently trained models."""

    mean: float
    low: float
    high: float
    """Student's interval over models; NaN for one model, which is a case study."""
    sign_agreement: float
    num_models: int
    random: RandomEffects | None


class Cells(NamedTuple):
    """Tests of many reads and cells; which of them may be named, and which may be marked on a map."""

    rows: dict[str, float]
    """p of each read, times their number (Bonferroni): does anything in the read change?"""
    cells: tuple[str, ...]
    effects: Numbers
    """Mean crossed effect on the clr of each cell, nats."""
    max_t_p: Numbers
    """Of each cell in the family of all cells."""
    named: tuple[str, ...]
    """Cells with max-T p <= 0.05 in reads with p <= 0.05: those of which may be spoken."""
    q_hochberg: Numbers
    q_yekutieli: Numbers


def primary_per_text(measured: Measured, *, name: str = "clr", place: str = "answer") -> Numbers:
    """Averages a number of each text over the attention reads of the middle third: [items, u, p].

    Args:
        measured: Of one model.
        name: Of ``passes.ROUTING`` or ``SHARES``, or ``"remark clr"``.
        place: Of ``CLAIM_PLACES``.
    """
    reads = middle_third(measured.sites)
    return np.asarray(measured.at(name, place)[..., reads].mean(-1))


def primary_effects(measured: Measured, *, name: str = "clr", place: str = "answer") -> Numbers:
    """Gives the primary number of each item; see ``primary_per_text`` for other numbers and places."""
    return crossed_effects(primary_per_text(measured, name=name, place=place))


def finding(effects: npt.ArrayLike, clusters: Sequence[str], *, num_draws: int) -> Finding:
    """Tests whether effects are symmetric around 0, with items of one template kept together.

    Args:
        effects: One for each item, 3 or more.
        clusters: Of each.
        num_draws: Of flips and of resamples.

    Example:
        >>> finding([1.0, 2.0, 3.0, 2.5], ["a", "a", "b", "b"], num_draws=100).p
        0.5
    """
    row, labels = np.asarray(effects, dtype=np.float64), np.asarray(clusters)
    flip = sign_flip(row, clusters=labels, num_flips=num_draws)
    by_item = sign_flip(row, num_flips=num_draws)
    interval = bootstrap(row, clusters=labels, num_resamples=num_draws)
    dz = effect_size(row).dz if np.ptp(row) > 0 else 0.0
    return Finding(
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        p=flip.p,
        smallest_p=flip.smallest_p,
        item_p=by_item.p,
        dz=dz,
        num_items=len(row),
        num_clusters=flip.num_units,
    )


def over_seeds(found: Sequence[Finding]) -> OverSeeds:
    """Puts the effects of several models together.

    Args:
        found: One for each model.

    Example:
        >>> one = finding([1.0, 2.0, 3.0, 2.5], ["a", "a", "b", "b"], num_draws=100)
        >>> over_seeds([one, one._replace(estimate=2.2)]).sign_agreement
        1.0
    """
    effects = [one.estimate for one in found]
    errors = np.array([(one.high - one.low) / (2 * 1.96) for one in found])
    agreement = sign_agreement(effects)
    if len(found) < 2:
        return OverSeeds(effects[0], float("nan"), float("nan"), agreement, 1, None)
    interval = seed_interval(effects)
    random = random_effects(effects, errors) if (errors > 0).all() else None
    return OverSeeds(interval.estimate, interval.low, interval.high, agreement, len(found), random)


def design_effect(effects: Numbers, clusters: Sequence[str]) -> float:
    """Says how many times as many items are needed because items of a template are alike.

    Args:
        effects: One for each item.
        clusters: Of each.

    Returns:
        Variance of the mean with templates kept together, over that of independent items; 1 at least.

    Example:
        >>> design_effect(np.array([1.0, 1.0, -1.0, -1.0]), ["a", "a", "b", "b"]).__round__(2)
        3.0
    """
    centred = effects - effects.mean()
    sums = cluster_sums(centred, np.asarray(clusters))
    alone = (centred**2).sum() / (len(effects) - 1) * len(effects)
    together = (sums**2).sum() * len(sums) / (len(sums) - 1)
    return max(1.0, float(together / alone)) if alone > 0 else 1.0


def cell_tests(measured: Measured, *, num_draws: int) -> Cells:
    """Tests every read, and the cells of those reads in which something changes.

    A read is tested by the largest t of its cells (max-T), and reads share alpha equally. A cell is tested
    in the family of all cells, and may be named where its read changes, too.

    Args:
        measured: Of a model that routes.
        num_draws: Sign flips, of whole clusters.
    """
    effects, clusters = crossed_effects(measured["cell clr"]), np.asarray(measured.clusters)
    reads = np.array([cell.split(" < ")[0] for cell in measured.cells])
    rows = {
        read: min(
            1.0,
            float(max_t(effects[:, reads == read], clusters=clusters, num_flips=num_draws).min())
            * len(measured.sites),
        )
        for read in measured.sites
    }
    family = max_t(effects, clusters=clusters, num_flips=num_draws)
    alone, _, _ = flip_p(cluster_sums(effects, clusters), num_draws, 0)
    named = [
        cell
        for cell, read, p in zip(measured.cells, reads, family, strict=True)
        if p <= 0.05 and rows[str(read)] <= 0.05
    ]
    return Cells(
        rows=rows,
        cells=measured.cells,
        effects=effects.mean(0),
        max_t_p=family,
        named=tuple(named),
        q_hochberg=benjamini_hochberg(alone),
        q_yekutieli=benjamini_yekutieli(alone),
    )

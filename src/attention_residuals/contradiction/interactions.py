"""Pairs of routes: what both do together, against the sum of what each does alone.

A route whose patch does nothing by itself may still have a role that another one takes over. So each pair is
patched together, with weights of the other text and never with zeros, and the effects of both alone are
subtracted. Above 0 a pair does more than the sum: one alone is made up for by the other. Below 0 it does less:
both bring the same thing about. Two routes of one read also share that read's weight.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from attention_residuals.contradiction.causal import DIRECTIONS, moved_answers
from attention_residuals.contradiction.effects import Finding, finding
from attention_residuals.data.synthetic import Item
from attention_residuals.models import LanguageModel
from attention_residuals.stats import max_t
from attention_residuals.stats.units import Numbers

__all__ = ["Interaction", "interaction_effects", "interactions"]


class Interaction(NamedTuple):
    """What a pair of routes does beyond the sum, in logits of the answer towards the other text's."""

    first: str
    second: str
    direction: str
    first_alone: float
    second_alone: float
    together: float
    beyond: Finding
    """Together less the sum of both alone; the interval is of this pair alone."""
    family_p: float
    """Of max-T over all pairs in both directions."""


def interactions(
    model: LanguageModel,
    items: Sequence[Item],
    clusters: Sequence[str],
    routes: Sequence[str],
    *,
    num_draws: int,
) -> tuple[Interaction, ...]:
    """Patches every pair of routes together, in both directions, and tests what is beyond the sum.

    Args:
        model: That routes.
        items: 3 or more.
        clusters: Of each item.
        routes: Two or more; n of them are n (n + 1) / 2 patched passes in each direction.
        num_draws: Sign flips and resamples.

    Returns:
        Each pair in each direction, those with the smallest p first, and the largest of those.
    """
    pairs = list(combinations(range(len(routes)), 2))
    sets = [[route] for route in routes] + [[routes[one], routes[other]] for one, other in pairs]
    moved: list[Numbers] = []
    for direction in DIRECTIONS:
        found, total = moved_answers(model, items, sets, direction=direction)
        moved.append(found * np.sign(total.mean()))
    beyond = [interaction_effects(found, pairs) for found in moved]
    family = max_t(np.concatenate(beyond).T, clusters=np.asarray(clusters), num_flips=num_draws)
    told = [
        Interaction(
            first=routes[one],
            second=routes[other],
            direction=direction,
            first_alone=float(found[one].mean()),
            second_alone=float(found[other].mean()),
            together=float(found[len(routes) + number].mean()),
            beyond=finding(effects[number], clusters, num_draws=num_draws),
            family_p=float(family[place * len(pairs) + number]),
        )
        for place, (direction, found, effects) in enumerate(zip(DIRECTIONS, moved, beyond, strict=True))
        for number, (one, other) in enumerate(pairs)
    ]
    return tuple(sorted(told, key=lambda one: (one.family_p, -abs(one.beyond.estimate))))


def interaction_effects(moved: Numbers, pairs: Sequence[tuple[int, int]]) -> Numbers:
    """Subtracts from what pairs do what both routes do alone: [pairs, items].

    Args:
        moved: [routes and then pairs, items].
        pairs: The numbers of both routes.

    Example:
        >>> interaction_effects(np.array([[1.0], [2.0], [5.0]]), [(0, 1)]).tolist()
        [[2.0]]
    """
    num_routes = len(moved) - len(pairs)
    first, second = ([pair[side] for pair in pairs] for side in range(2))
    return np.asarray(moved[num_routes:] - moved[first] - moved[second])

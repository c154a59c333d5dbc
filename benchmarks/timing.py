"""Paired timing: arms take turns, there and back (ABBA), so that a busy machine slows all of them."""

import random
import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["paired_times", "ratio"]


def paired_times(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns, by arm, the seconds of one call in each round (the mean of its two calls there and back)."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round warms up
        here: dict[str, float] = dict.fromkeys(names, 0.0)
        for name in (*names, *reversed(names)):
            start = time.perf_counter()
            arms[name]()
            here[name] += (time.perf_counter() - start) / 2
        if number >= 0:
            for name in names:
                times[name].append(here[name])
    return times


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Returns the median of paired ratios ours / theirs, with a 95 % bootstrap interval."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]

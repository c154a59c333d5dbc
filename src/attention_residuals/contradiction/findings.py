"""What is found on one model, as what JSON can hold."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention_residuals.contradiction.behaviour import Gate, accuracies, gate
from attention_residuals.contradiction.causal import (
    DIRECTIONS,
    METRICS,
    Moved,
    Patching,
    patched,
    swept_routes,
)
from attention_residuals.contradiction.controls import Evidence, all_controls
from attention_residuals.contradiction.effects import cell_tests, finding, primary_effects
from attention_residuals.contradiction.exclusivity import BOUND, NUM_SEARCHED, reaches, searched_sites
from attention_residuals.contradiction.interactions import interactions
from attention_residuals.contradiction.measurement import Measured
from attention_residuals.contradiction.passes import ROUTING
from attention_residuals.contradiction.study import Study
from attention_residuals.data.synthetic import CLAIM_PLACES, Item
from attention_residuals.errors import NonFiniteError
from attention_residuals.models import LanguageModel
from attention_residuals.stats import bootstrap, crossed_effects, rank_correlation, restoration
from attention_residuals.stats.units import Numbers

__all__ = ["behaviour_of", "causes_of", "chosen_routes", "plain", "routing_of"]


def behaviour_of(sets: dict[str, Measured], *, num_draws: int) -> tuple[Gate, dict[str, Any]]:
    """Says what a model does, before anything is said of its routing.

    Args:
        sets: Measured on it, by the name of the set; with ``"main"``.
        num_draws: Sign flips.
    """
    found = gate(sets["main"], num_draws=num_draws)
    told = {
        "passed": found.is_passed,
        **plain(found),
        "accuracy": {name: accuracies(measured, name=name) for name, measured in sets.items()},
        "model": sets["main"].about["model"],
        "items": sets["main"].about["items"],
        "code": sets["main"].about["code"],
    }
    return found, told


def routing_of(evidence: Evidence, full: Measured | None) -> dict[str, Any]:
    """Says what routing does where a step contradicts an earlier one.

    Args:
        evidence: Of one seed.
        full: Main items on the Full model of the same seed; None where it fails the gate.
    """
    main, draws = evidence.sets["main"], evidence.num_draws

    def of(measured: Measured, name: str = "clr", place: str = "answer") -> dict[str, Any]:
        effects = primary_effects(measured, name=name, place=place)
        return dict(plain(finding(effects, measured.clusters, num_draws=draws)))

    by_read = crossed_effects(main.at("clr", "answer"))
    profile = {
        site: bootstrap(by_read[:, place], clusters=np.asarray(main.clusters), num_resamples=draws)
        for place, site in enumerate(main.sites)
    }
    cells = cell_tests(main, num_draws=draws)
    return {
        "primary": of(main),
        "full": of(full) if full is not None else None,
        "places": {place: of(main, place=place) for place in CLAIM_PLACES},
        "numbers": {name: of(main, name) for name in ROUTING},
        "profile": {site: one.estimate for site, one in profile.items()},
        "profile_intervals": {site: plain([one.low, one.high]) for site, one in profile.items()},
        "cells": plain(cells),
        "controls": {name: plain(control) for name, control in all_controls(evidence).items()},
    }


def chosen_routes(model: LanguageModel, items: Sequence[Item], main: Measured, number: int) -> list[str]:
    """Chooses the routes whose weights move the answer most, mean over both directions.

    Args:
        model: That routes.
        items: Of the pilot.
        main: The same items, measured.
        number: How many.
    """
    swept = swept_routes(model, items, main.cells)
    strength = np.mean([swept[direction] for direction in DIRECTIONS], axis=0)
    return [main.cells[place] for place in np.argsort(-strength, kind="stable")[:number]]


def causes_of(
    study: Study, model: LanguageModel, items: Sequence[Item], main: Measured, routes: Sequence[str]
) -> dict[str, Any]:
    """Says what routes do that the pilot chose, and which readable number tells what routes do.

    Args:
        study: How many items and random routes there are.
        model: That routes.
        items: Main items of the confirming run.
        main: The same items, measured.
        routes: Of the pilot.
    """
    own = items[: study.causal_items]
    clusters = main.clusters[: len(own)]
    kinds: tuple[Patching, ...] = ("weights", "values", "both")
    found: dict[str, Any] = {"routes": list(routes), "num_items": len(own)}
    for direction in DIRECTIONS:
        by_patch = {kind: patched(model, own, routes, patch=kind, direction=direction) for kind in kinds}
        random = [
            patched(model, own, routes, patch="random", direction=direction, seed=seed)
            for seed in range(1, study.num_random + 1)
        ]
        found[direction] = {
            kind: _moved(one, clusters, study.num_draws) for kind, one in by_patch.items()
        } | {"random": _random(by_patch["weights"], random)}
    if len(routes) > 1:
        pairs = interactions(model, own, clusters, routes, num_draws=study.num_draws)
        found["interactions"] = [plain(pair) for pair in pairs]
    searched = own[:NUM_SEARCHED]
    reach = reaches(model, searched, searched_sites(main.sites, routes))
    found["exclusivity"] = {
        "bound": BOUND,
        "num_items": len(searched),
        "reads": [plain(one) for one in reach],
    }
    found["agreement"] = _agreement(study, model, own, main)
    return found


def plain(found: Any) -> Any:
    """Turns named tuples and arrays into what JSON holds; NaN and infinity become None.

    Example:
        >>> plain({"a": np.array([1.0, np.nan]), "b": (2, "c")})
        {'a': [1.0, None], 'b': [2, 'c']}
    """
    if isinstance(found, dict):
        return {str(key): plain(value) for key, value in found.items()}
    if isinstance(found, tuple) and hasattr(found, "_asdict"):
        return plain(found._asdict())
    if isinstance(found, np.ndarray | np.generic):
        return plain(found.tolist())
    if isinstance(found, tuple | list):
        return [plain(one) for one in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def _moved(one: Moved, clusters: Sequence[str], num_draws: int) -> dict[str, Any]:
    told: dict[str, Any] = {"divergence": float(one.divergence.mean()), "mass": float(one.mass.mean())}
    for metric in METRICS:
        told[metric] = {
            "moved": plain(finding(one.moved[metric], clusters, num_draws=num_draws)),
            "total": plain(finding(one.total[metric], clusters, num_draws=num_draws)),
            "share": _share(one.moved[metric], one.total[metric]),
        }
    return told


def _share(moved: Numbers, total: Numbers) -> dict[str, Any]:
    try:
        return dict(plain(restoration(moved, total)))
    except NonFiniteError as error:
        return {"estimate": None, "low": None, "high": None, "why": error.got}


def _random(chosen: Moved, random: Sequence[Moved]) -> dict[str, Any]:
    """Compares the chosen routes with random ones of the same mass."""
    told: dict[str, Any] = {"mass": float(np.mean([one.mass.mean() for one in random]))}
    for metric in METRICS:
        towards = np.sign(chosen.total[metric].mean())
        own = towards * chosen.moved[metric].mean()
        others = np.array([towards * one.moved[metric].mean() for one in random])
        p = (1 + int((others >= own).sum())) / (1 + len(others))
        mean = np.mean([one.moved[metric] for one in random], axis=0)
        share = _share(mean, chosen.total[metric])
        told[metric] = {"chosen": float(own), "random": others.tolist(), "p": p, "share": share}
    return told


def _agreement(study: Study, model: LanguageModel, items: Sequence[Item], main: Measured) -> dict[str, Any]:
    """Correlates readable numbers of all routes with what patching their weights does."""
    swept = swept_routes(model, items, main.cells)
    effect = np.mean([swept[direction] for direction in DIRECTIONS], axis=0)
    rows = slice(0, len(items))

    def mean(name: str) -> Numbers:
        return np.asarray(main[f"cell {name}"][rows].mean((0, 1, 2)))

    readable = {name: mean(name) for name in ("weight", "norm share", "projection share")}
    readable["absolute projection share"] = np.abs(readable["projection share"])
    for name in ("weight", "clr"):
        change = main[f"cell {name}"][rows]
        within = np.abs(change[:, [0, 1], [1, 0]] - change[:, [0, 1], [0, 1]])
        readable[f"change of {name} within pairs"] = within.mean((0, 1))
    return {
        "effect": dict(zip(main.cells, effect.tolist(), strict=True)),
        "correlations": {
            name: plain(rank_correlation(numbers, effect, num_resamples=study.num_draws // 5 + 1))
            for name, numbers in readable.items()
        },
    }

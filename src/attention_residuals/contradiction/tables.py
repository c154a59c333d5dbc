"""The results as tables to read without the page: rows of texts, numbers with all their digits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attention_residuals.contradiction.causal import DIRECTIONS, METRICS
from attention_residuals.contradiction.claims import Claim, away_p
from attention_residuals.contradiction.study import ITEM_SETS
from attention_residuals.data.synthetic import StepItems

__all__ = ["TABLES", "tables"]

Result = Mapping[str, Any]
Rows = tuple[tuple[str, ...], ...]

TABLES = (
    "accuracy",
    "gate",
    "controls",
    "effects",
    "over_seeds",
    "cells",
    "restoration",
    "interactions",
    "exclusivity",
    "correlations",
)
"""Those that there may be; each is a file of the folder tables/."""

_INTERVAL = ("estimate", "low", "high")
_TESTED = (*_INTERVAL, "p", "smallest_p", "item_p", "dz", "num_items", "num_clusters")


def tables(result: Result, claims: Sequence[Claim]) -> dict[str, Rows]:
    """Makes every table of which something was measured and may be shown.

    Models that fail the gate have rows in ``accuracy`` and ``gate`` only; and where a control fails that must
    hold, there is nothing beyond ``controls``.

    Args:
        result: What confirm.json holds.
        claims: Of ``conclusions``.

    Returns:
        Rows by the name of the table, headers first.
    """
    seeds: Result = result["seeds"]
    routed = {seed: one for seed, one in seeds.items() if one["routing"] is not None}
    about = {claim.about for claim in claims}
    found: dict[str, list[tuple[Any, ...]]] = {"accuracy": list(_accuracy(seeds)), "gate": list(_gate(seeds))}
    if routed:
        found["controls"] = list(_controls(routed))
    if "routing" in about:
        found["effects"] = list(_effects(routed))
        found["over_seeds"] = list(_over_seeds(result))
        found["cells"] = list(_cells(routed))
    if "causes" in about:
        found["restoration"] = list(_restoration(routed))
        found["interactions"] = list(_interactions(routed))
        found["exclusivity"] = list(_exclusivity(routed))
        found["correlations"] = list(_correlations(routed))
    return {
        name: tuple(tuple(map(_text, row)) for row in rows) for name, rows in found.items() if len(rows) > 1
    }


def _text(value: Any) -> str:
    """Writes a cell; what is None was not measured, or is not defined, and stays empty."""
    return "" if value is None else str(value)


def _accuracy(seeds: Result) -> Iterator[tuple[Any, ...]]:
    shares = ("consistent", "contradictory", "verdict")
    yield ("seed", "set", "kind", "distance", "family", "items", *(f"{name}_right" for name in shares))
    for seed, one in seeds.items():
        for name, families in one["behaviour"]["accuracy"].items():
            told = {"kind": StepItems.kind, "distance": StepItems.distance, **ITEM_SETS[name]}
            for family, found in families.items():
                numbers = (found[key] for key in ("items", *shares))
                yield (seed, name, told["kind"], told["distance"], family, *numbers)


def _gate(seeds: Result) -> Iterator[tuple[Any, ...]]:
    """Rows of Block and Full models; what was not measured, or not kept, is empty."""
    shares = ("answers", "verdicts", "flips")
    tested = [f"{name}_{key}" for name in ("surprise", "pull") for key in _TESTED]
    yield ("seed", "arm", "passed", *shares, *tested, "probe", "probe_shuffled", "failures", "model")
    for seed, one in seeds.items():
        for arm, found in (("Block", one["behaviour"]), ("Full", one["full_gate"])):
            if found is None:
                yield (seed, arm, *([None] * (len(shares) + len(tested) + 3)), "not measured", None)
                continue
            numbers = [found.get(name, {}).get(key) for name in ("surprise", "pull") for key in _TESTED]
            probe = found.get("probe", {})
            yield (
                *(seed, arm, found["passed"], *(found.get(name) for name in shares), *numbers),
                *(probe.get("accuracy"), probe.get("shuffled"), "; ".join(found["failures"]), found["model"]),
            )


def _controls(routed: Result) -> Iterator[tuple[Any, ...]]:
    yield ("seed", "control", "expected", "holds", "number", "value")
    for seed, one in routed.items():
        for name, found in one["routing"]["controls"].items():
            for number, value in found["numbers"].items():
                yield (seed, name, found["expected"], found["holds"], number, value)


def _effects(routed: Result) -> Iterator[tuple[Any, ...]]:
    yield ("seed", "model", "number", "place", *_TESTED)
    for seed, one in routed.items():
        routing = one["routing"]
        rows = [("Block", "clr", "answer", routing["primary"])]
        rows += [("Full", "clr", "answer", routing["full"])] if routing["full"] is not None else []
        rows += [("Block", "clr", place, found) for place, found in routing["places"].items()]
        rows += [("Block", name, "answer", found) for name, found in routing["numbers"].items()]
        # The primary number stands among those by place and by name, too, and is written once.
        told = {row[:3]: row[3] for row in rows}
        for names, found in told.items():
            yield (seed, *names, *(found[key] for key in _TESTED))


def _over_seeds(result: Result) -> Iterator[tuple[Any, ...]]:
    names, random = ("mean", "low", "high", "sign_agreement", "num_models"), ("mean", "low", "high")
    yield ("model", *names, *(f"random_effects_{name}" for name in random))
    for arm, model in (("primary", "Block"), ("full", "Full")):
        found = result["over_seeds"][arm]
        if found is None:
            continue
        drawn = found["random"] or dict.fromkeys(random)
        yield (model, *(found[name] for name in names), *(drawn[name] for name in random))


def _cells(routed: Result) -> Iterator[tuple[Any, ...]]:
    numbers = ("effects", "max_t_p", "q_hochberg", "q_yekutieli")
    yield ("seed", "site", "source", "effect_nats", "p_read", *numbers[1:], "named", "answer_moved_logits")
    for seed, one in routed.items():
        found, moved = one["routing"]["cells"], one["causes"]["agreement"]["effect"]
        for place, cell in enumerate(found["cells"]):
            site, source = cell.split(" < ")
            effect, *tests = (found[name][place] for name in numbers)
            yield (
                *(seed, site, source, effect, found["rows"][site], *tests, cell in found["named"]),
                moved.get(cell),
            )


def _restoration(routed: Result) -> Iterator[tuple[Any, ...]]:
    shares = tuple(f"share_{name}" for name in _INTERVAL)
    moved = tuple(f"moved_{name}" for name in (*_INTERVAL, "p"))
    yield (
        "seed",
        "direction",
        "patch",
        "metric",
        *shares,
        *moved,
        "total",
        "p_among_random",
        "p_other_way",
        "kl_nats",
        "mass",
    )
    for seed, one in routed.items():
        for direction in DIRECTIONS:
            patches = one["causes"][direction]
            for patch, found in patches.items():
                for metric in METRICS:
                    own = found[metric]
                    is_random = patch == "random"
                    yield (
                        *(seed, direction, patch, metric, *(own["share"][name] for name in _INTERVAL)),
                        *(None if is_random else own["moved"][name] for name in (*_INTERVAL, "p")),
                        None if is_random else own["total"]["estimate"],
                        patches["random"][metric]["p"] if patch == "weights" else None,
                        away_p(patches["random"][metric]) if patch == "weights" else None,
                        *(found.get("divergence"), found["mass"]),
                    )


def _interactions(routed: Result) -> Iterator[tuple[Any, ...]]:
    names = ("first", "second", "direction", "first_alone", "second_alone", "together")
    yield ("seed", *names, *(f"beyond_{name}" for name in _INTERVAL), "p", "max_t_p")
    for seed, one in routed.items():
        for pair in one["causes"].get("interactions", ()):
            beyond = (pair["beyond"][name] for name in (*_INTERVAL, "p"))
            yield (seed, *(pair[name] for name in names), *beyond, pair["family_p"])


def _exclusivity(routed: Result) -> Iterator[tuple[Any, ...]]:
    moved = ("moved", "least", "most", "moved_same", "farthest")
    names = ("site", *moved, "pair", "divergence", "largest_divergence")
    yield ("seed", *names, "same_answers", "bound_nats", "items")
    for seed, one in routed.items():
        found = one["causes"]["exclusivity"]
        for read in found["reads"]:
            numbers = (read[name] for name in (*names, "same_answers"))
            yield (seed, *numbers, found["bound"], found["num_items"])


def _correlations(routed: Result) -> Iterator[tuple[Any, ...]]:
    yield ("seed", "number", "rank_correlation", "low", "high", "routes")
    for seed, one in routed.items():
        for name, found in one["causes"]["agreement"]["correlations"].items():
            yield (seed, name, *(found[key] for key in ("correlation", "low", "high", "num_edges")))

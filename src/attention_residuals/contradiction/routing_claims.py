"""What may be said of routing: the primary number, the weight beside it, reads, surprise and cells."""

from collections.abc import Mapping
from typing import Any

from attention_residuals.contradiction.claims import Claim, primary_of
from attention_residuals.contradiction.measurement import middle_third
from attention_residuals.contradiction.preregistration import ALPHA

__all__ = ["routing_claims"]

Result = Mapping[str, Any]


def routing_claims(result: Result, passing: Result) -> tuple[Claim, ...]:
    """Makes the sentences about routing.

    Args:
        result: What confirm.json holds.
        passing: By seed, those whose Block model passes the gate; one or more.
    """
    return (
        _primary(result, passing, "primary"),
        _weight(passing),
        *_profile(passing),
        _primary(result, passing, "full") if primary_of(passing, "full") else _no_full_model(passing),
        _surprise(passing),
        _cells(passing),
    )


def _primary(result: Result, passing: Result, arm: str) -> Claim:
    found, name = primary_of(passing, arm), "Full" if arm == "full" else "Block"
    told = "; ".join(
        f"seed {seed} {one['estimate']:+.4f} [{one['low']:+.4f}, {one['high']:+.4f}], p {one['p']:.2g}, "
        f"dz {one['dz']:+.2f}"
        for seed, one in found.items()
    )
    together = result["over_seeds"][arm]
    mean = (
        f"Mean over {together['num_models']} models {together['mean']:+.4f} "
        f"[{together['low']:+.4f}, {together['high']:+.4f}] (Student)"
        if together["low"] is not None
        else "One model is a case study"
    )
    out = [seed for seed in passing if seed not in found]
    left = f" Of {_seeds(out)} nothing is said here: the Full model fails the gate." if out else ""
    return Claim(
        f"{_verdict(found)}: after a contradiction the {name} models' attention reads of the middle third "
        f"of the layers shift at the answer {_way(found)} the embedding (nats of clr): {told}. {mean}.{left}",
        f"sign flips of templates, p <= {ALPHA:g} and the same sign for every seed",
        f"confirm.json: seeds.*.routing.{arm}",
        "routing",
    )


def _weight(passing: Result) -> Claim:
    """The clr of a source can rise where its weight falls, so both are told."""
    told, against = [], []
    for seed, one in passing.items():
        weight, ratio = one["routing"]["numbers"]["weight"], one["routing"]["primary"]
        against += [seed] if weight["estimate"] * ratio["estimate"] < 0 else []
        told.append(
            f"seed {seed} {weight['estimate']:+.5f} [{weight['low']:+.5f}, {weight['high']:+.5f}], "
            f"p {weight['p']:.2g}, beside {ratio['estimate']:+.4f} nats of clr"
        )
    start = (
        f"The weight on the embedding in the same reads moves the other way than its clr with {_seeds(against)}, so a "
        "shift towards or away from the embedding holds there of its ratio to the other sources, and not of its weight"
        if against
        else "The weight on the embedding in the same reads moves the same way as its clr"
    )
    return Claim(
        f"{start}: {'; '.join(told)}.",
        "sign flips of templates; beside the primary number, described",
        "confirm.json: seeds.*.routing.numbers",
        "routing",
    )


def _profile(passing: Result) -> list[Claim]:
    """Of several models: whether single reads move the same way in all of them."""
    if len(passing) < 2:
        return []
    profiles = [one["routing"]["profile"] for one in passing.values()]
    sites = tuple(profiles[0])
    apart = [
        site for site in sites if min(one[site] for one in profiles) < 0 < max(one[site] for one in profiles)
    ]
    own = [sites[number] for number in middle_third(sites)]
    differing = [site for site in own if site in apart]
    start = (
        f"Read by read the seeds do not agree: the effect on clr differs in sign between them at {len(apart)} of "
        f"{len(sites)} reads, and at {len(differing)} of the {len(own)} whose mean is the primary number "
        f"({', '.join(differing) or 'none'})"
        if apart
        else f"The effect on clr has the same sign with every seed at each of {len(sites)} reads"
    )
    return [
        Claim(
            f"{start}.",
            "signs of estimates; described, not tested",
            "confirm.json: seeds.*.routing.profile",
            "routing",
        )
    ]


def _no_full_model(passing: Result) -> Claim:
    return Claim(
        f"Nothing is said of the Full models' routing: none passes the gate ({_seeds(list(passing))}).",
        "gate",
        "confirm.json: seeds",
        "routing",
    )


def _surprise(passing: Result) -> Claim:
    found = {seed: one["routing"]["controls"]["surprise-matched"] for seed, one in passing.items()}
    start = (
        "At equal surprisal a contradiction changes the primary number more than a rare word does, with every seed, by "
        "the preregistered test of single items"
        if all(one["holds"] for one in found.values())
        else "At equal surprisal what a contradiction does to the primary number is not told from what a rare word "
        "does with every seed, by the preregistered test of single items"
    )
    clear = any(one["p"] <= ALPHA for one in primary_of(passing, "primary").values())
    only = (
        ""
        if clear
        else (
            " This compares two kinds of edit, and is no evidence of a shift, which the primary test did not find."
        )
    )
    told = "; ".join(f"seed {seed}: {one['found']}" for seed, one in found.items())
    return Claim(
        f"{start}. {told}.{only}",
        "analysis of covariance on surprisal, clusters = items (preregistered); by templates where that was measured",
        "confirm.json: seeds.*.routing.controls",
        "routing",
    )


def _cells(passing: Result) -> Claim:
    named = {seed: one["routing"]["cells"]["named"] for seed, one in passing.items()}
    every = set.intersection(*(set(cells) for cells in named.values()))
    tested = len(next(iter(passing.values()))["routing"]["cells"]["cells"])
    told = ", ".join(f"{len(cells)} with seed {seed}" for seed, cells in named.items())
    start = (
        f"Cells that may be named with every seed: {', '.join(sorted(every))}"
        if every
        else "No cell may be named with every seed"
    )
    return Claim(
        f"{start}. Of {tested} cells: {told}.",
        "max-T over all cells, inside reads whose own max-T passes Bonferroni, p <= 0.05",
        "confirm.json: seeds.*.routing.cells",
        "routing",
    )


def _verdict(found: Result) -> str:
    clear = [one for one in found.values() if one["p"] <= ALPHA]
    agree = len({one["estimate"] > 0 for one in clear}) == 1
    if clear and not agree:
        return "Models contradict each other"
    return "Not found" if not clear else "Found" if len(clear) == len(found) else "Found in some models only"


def _way(found: Result) -> str:
    signs = {one["estimate"] > 0 for one in found.values()}
    return "towards or away from" if len(signs) > 1 else "towards" if signs == {True} else "away from"


def _seeds(seeds: list[str]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"

"""The results in plain words: each sentence with the test behind it and the artefact that holds the numbers."""

from collections.abc import Mapping
from typing import Any

from attention_residuals.contradiction.cause_claims import cause_claims
from attention_residuals.contradiction.claims import Claim, primary_of
from attention_residuals.contradiction.preregistration import ALPHA

__all__ = ["MUST_HOLD", "conclusions"]

MUST_HOLD = ("before the plant", "untrained and zero-query", "static weights")
"""Controls without which no number counts, since each must be 0 by construction."""

Result = Mapping[str, Any]


def conclusions(result: Result) -> tuple[Claim, ...]:
    """Says what was found and what was not.

    Nothing is said of routing where no model passes the gate, or where a control fails that must hold.

    Args:
        result: What confirm.json holds.
    """
    seeds: Result = result["seeds"]
    passing = {seed: one for seed, one in seeds.items() if one["routing"] is not None}
    claims = list(_gate(seeds, passing))
    if not passing:
        return tuple(claims)
    broken = list(_broken(passing))
    if broken:
        return (*claims, *broken)
    return (
        *claims,
        *_primary(result, passing),
        *_surprise(passing),
        *_cells(passing),
        *cause_claims(passing),
    )


def _gate(seeds: Result, passing: Result) -> list[Claim]:
    test = "behavioural gate: answers, surprisal of the plant, verdicts or a linear probe"
    claims = []
    for seed, one in seeds.items():
        told = one["behaviour"]
        numbers = (
            f"it answers {told['answers']:.0%} of consistent texts right, {told['verdicts']:.0%} of its verdicts "
            f"are right, a wrong claim costs {told['surprise']['estimate']:+.2f} nats more, {told['flips']:.0%} of "
            f"contradictory texts are answered as the claim implies, and a linear probe gets "
            f"{told['probe']['accuracy']:.0%} ({told['probe']['shuffled']:.0%} with shuffled labels)"
        )
        end = "" if told["passed"] else f". It fails: {'; '.join(told['failures'])}"
        word = "passes" if told["passed"] else "does not pass"
        claims.append(
            Claim(
                f"The Block model of seed {seed} {word} the gate: {numbers}{end}.",
                test,
                f"confirm.json: seeds.{seed}.behaviour",
                "behaviour",
            )
        )
    if not passing:
        claims.append(
            Claim(
                "No model passes the gate, so nothing is claimed about what their depth weights do: a model that "
                "does not do the task, or does not notice, cannot show how noticing is done.",
                test,
                "confirm.json: seeds",
                "behaviour",
            )
        )
    return claims


def _broken(passing: Result) -> list[Claim]:
    return [
        Claim(
            f"The pipeline is not to be trusted: with seed {seed} the control {name!r} gave "
            f"{one['routing']['controls'][name]['found']}, and must give "
            f"{one['routing']['controls'][name]['expected']}. No further claim is made.",
            name,
            f"confirm.json: seeds.{seed}.routing.controls",
            "pipeline",
        )
        for seed, one in passing.items()
        for name in MUST_HOLD
        if not one["routing"]["controls"][name]["holds"]
    ]


def _primary(result: Result, passing: Result) -> list[Claim]:
    claims = []
    for arm, name in (("primary", "Block"), ("full", "Full")):
        found = primary_of(passing, arm)
        if not found:
            claims.append(_no_full_model(passing))
            continue
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
        claims.append(
            Claim(
                f"{_verdict(found)}: after a contradiction the {name} models' attention reads of the middle third "
                f"of the layers shift at the answer {_way(found)} the embedding (nats of clr): {told}. {mean}.",
                f"sign flips of templates, p <= {ALPHA:g} and the same sign for every seed",
                f"confirm.json: seeds.*.routing.{arm}",
                "routing",
            )
        )
    return claims


def _no_full_model(passing: Result) -> Claim:
    why = "; ".join(
        f"seed {seed}: {', '.join(one['routing']['full_failures'])}" for seed, one in passing.items()
    )
    return Claim(
        f"Nothing is said of the Full models' routing: none passes the gate ({why}).",
        "gate",
        "confirm.json: seeds.*.routing.full_failures",
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


def _surprise(passing: Result) -> list[Claim]:
    found = {seed: one["routing"]["controls"]["surprise-matched"] for seed, one in passing.items()}
    beyond = all(one["holds"] for one in found.values())
    start = (
        "The shift is more than that of an equally surprising word"
        if beyond
        else "The shift cannot be told from that of an equally surprising word"
    )
    told = "; ".join(f"seed {seed}: {one['found']}" for seed, one in found.items())
    claim = Claim(
        f"{start}. {told}.",
        "analysis of covariance on surprisal, clusters = items",
        "confirm.json: seeds.*.routing.controls",
        "routing",
    )
    return [claim]


def _cells(passing: Result) -> list[Claim]:
    named = {seed: one["routing"]["cells"]["named"] for seed, one in passing.items()}
    every = set.intersection(*(set(cells) for cells in named.values()))
    tested = len(next(iter(passing.values()))["routing"]["cells"]["cells"])
    told = ", ".join(f"{len(cells)} with seed {seed}" for seed, cells in named.items())
    start = f"Cells that may be named with every seed: {', '.join(sorted(every))}" if every else (
        "No cell may be named with every seed"
    )  # fmt: skip
    return [
        Claim(
            f"{start}. Of {tested} cells: {told}.",
            "max-T over all cells, inside reads whose own max-T passes Bonferroni, p <= 0.05",
            "confirm.json: seeds.*.routing.cells",
            "routing",
        )
    ]

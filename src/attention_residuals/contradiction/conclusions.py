"""The results in plain words: each sentence with the test behind it and the artefact that holds the numbers."""

from collections.abc import Mapping
from typing import Any

from attention_residuals.contradiction.cause_claims import cause_claims
from attention_residuals.contradiction.claims import Claim
from attention_residuals.contradiction.routing_claims import routing_claims

__all__ = ["MUST_HOLD", "conclusions"]

MUST_HOLD = ("before the plant", "untrained and zero-query", "static weights")
"""Controls without which no number counts, since each must be 0 by construction."""

GATE = "behavioural gate: answers, surprisal of the plant, verdicts or a linear probe"

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
    return (*claims, *routing_claims(result, passing), *cause_claims(passing))


def _gate(seeds: Result, passing: Result) -> list[Claim]:
    claims = [
        _gated("Block", seed, one["behaviour"], f"confirm.json: seeds.{seed}.behaviour")
        for seed, one in seeds.items()
    ]
    for seed, one in seeds.items():
        if one["full_gate"] is not None:
            claims.append(_gated("Full", seed, one["full_gate"], f"confirm.json: seeds.{seed}"))
        if lacking := _lacking(seed, one):
            claims.append(
                Claim(lacking, "what there was to measure", f"confirm.json: seeds.{seed}", "behaviour")
            )
    if not passing:
        claims.append(
            Claim(
                "No model passes the gate, so nothing is claimed about what their depth weights do: a model that "
                "does not do the task, or does not notice, cannot show how noticing is done.",
                GATE,
                "confirm.json: seeds",
                "behaviour",
            )
        )
    return claims


def _gated(arm: str, seed: str, told: Result, artefact: str) -> Claim:
    """Says what a model does; results of format 1 hold no numbers of a Full one."""
    numbers = (
        f": it answers {told['answers']:.0%} of consistent texts right, {told['verdicts']:.0%} of its verdicts "
        f"are right, a wrong claim costs {told['surprise']['estimate']:+.2f} nats more, {told['flips']:.0%} of "
        f"contradictory texts are answered as the claim implies, and a linear probe gets "
        f"{told['probe']['accuracy']:.0%} ({told['probe']['shuffled']:.0%} with shuffled labels)"
        if "answers" in told
        else ""
    )
    end = "" if told["passed"] else f". It fails: {'; '.join(told['failures'])}"
    word = "passes" if told["passed"] else "does not pass"
    return Claim(
        f"The {arm} model of seed {seed} {word} the gate{numbers}{end}.", GATE, artefact, "behaviour"
    )


def _lacking(seed: str, one: Result) -> str:
    """Names the models of a seed that nothing was measured on, if any."""
    if one["missing"]:
        arms = " and no ".join("Full" if arm == "full" else arm for arm in one["missing"])
        return f"There was no {arms} model of seed {seed} that was trained to its end."
    if one["missing"] is None and one["routing"] is None:
        return (
            f"No Full and no standard model of seed {seed} was measured, since its Block model does not pass the gate; "
            "these results do not say whether they were trained."
        )
    return ""


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

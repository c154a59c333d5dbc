"""Sentences of the report, each with the test behind it and the artefact that holds its numbers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Claim", "away_p", "claims_yaml", "primary_of"]


class Claim(NamedTuple):
    """A sentence of the report."""

    sentence: str
    test: str
    artefact: str
    """A file of the study's folder, and where in it the numbers are."""
    about: str
    """``behaviour``, ``pipeline``, ``routing`` or ``causes``."""


def claims_yaml(claims: Sequence[Claim], about: Mapping[str, str]) -> str:
    """Writes claims.yaml: every sentence with its test and its artefact.

    Args:
        claims: Of ``conclusions``.
        about: Digests of what they rest on.

    Example:
        >>> print(claims_yaml([Claim("It is so.", "sign flip", "confirm.json", "routing")], {"code": "ab"}))
        about:
          code: "ab"
        claims:
          - sentence: "It is so."
            test: "sign flip"
            artefact: "confirm.json"
            about: "routing"
        <BLANKLINE>
    """
    lines = ["about:", *(f"  {name}: {json.dumps(value)}" for name, value in about.items()), "claims:"]
    for claim in claims:
        fields = [f"{name}: {json.dumps(value)}" for name, value in claim._asdict().items()]
        lines += [f"  - {fields[0]}", *(f"    {one}" for one in fields[1:])]
    return "\n".join(lines) + "\n"


def primary_of(routed: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Lists the primary finding of each seed that has one.

    Args:
        routed: Seeds whose Block model passed the gate, as confirm.json holds them.
        arm: ``primary`` of the Block models, or ``full``, which may lack some.
    """
    found = {seed: one["routing"][arm] for seed, one in routed.items()}
    return {seed: one for seed, one in found.items() if one is not None}


def away_p(found: Mapping[str, Any]) -> float:
    """Ranks chosen routes among random ones the other way: how seldom random ones move as far from the other text.

    Args:
        found: ``chosen`` and ``random``, movement towards the other text's number.

    Example:
        >>> away_p({"chosen": -2.0, "random": [0.1, -0.3, 0.2]})
        0.25
    """
    chosen: float = found["chosen"]
    random: list[float] = found["random"]
    return (1 + sum(one <= chosen for one in random)) / (1 + len(random))

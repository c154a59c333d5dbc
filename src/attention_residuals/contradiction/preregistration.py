"""The preregistration: what was decided before the confirming run, and that it was committed before."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_residuals.configs import encode
from attention_residuals.contradiction.filled_in import check_filled_in, check_routes
from attention_residuals.contradiction.study import Study, digest
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import read_json
from attention_residuals.stats import needed_items
from attention_residuals.train.config import first_difference
from attention_residuals.train.environment import git

__all__ = [
    "ALPHA",
    "LARGEST_DZ",
    "SMALLEST_DZ",
    "Preregistration",
    "checked_pilot",
    "filled_in",
    "filled_in_by",
    "pilot_digest",
    "planned_items",
    "preregistered",
]

ALPHA = 0.001
"""Of the primary test: a headline wants a small p."""

FILLED_IN = ("study", "pilot", "pilot_dz", "planned_dz", "design_effect", "num_items", "routes")
"""What the pilot puts into the document."""

SMALLEST_DZ, LARGEST_DZ = 0.2, 0.3
"""Between these the effect is planned for, whatever the pilot saw: a small pilot guesses too much."""


class Preregistration(NamedTuple):
    """What the confirming run takes from the document."""

    sha256: str
    commit: str
    """The last one that changed the document."""
    num_items: int
    routes: dict[str, tuple[str, ...]]
    """By seed, the routes that the pilot chose."""
    pilot: str
    """The digest of the pilot's results; see ``pilot_digest``."""


def planned_items(study: Study, dz: float, design_effect: float) -> tuple[float, int]:
    """Says which effect is planned for and how many items find it with 80 % power.

    Args:
        study: Has a least number of its own.
        dz: Of the pilot.
        design_effect: Of the pilot; see ``effects.design_effect``.

    Example:
        >>> planned_items(Study(), dz=0.5, design_effect=1.0), planned_items(Study(), dz=0.1, design_effect=2.0)
        ((0.3, 400), (0.2, 866))
    """
    planned = min(max(abs(dz), SMALLEST_DZ), LARGEST_DZ)
    needed = math.ceil(needed_items(planned, alpha=ALPHA) * design_effect)
    return planned, max(needed, study.confirm_items)


def filled_in(
    study: Study, *, pilot: str, dz: float, design_effect: float, routes: dict[str, list[str]]
) -> dict[str, Any]:
    """Makes the part of the document that the pilot fills in.

    Args:
        study: What the pilot was run with.
        pilot: The digest of its results, of ``pilot_digest``.
        dz: Of the primary number in the pilot, median over seeds.
        design_effect: The same.
        routes: By seed.
    """
    planned, number = planned_items(study, dz, design_effect)
    return {
        "study": digest(encode(study)),
        "pilot": pilot,
        "pilot_dz": round(dz, 4),
        "planned_dz": planned,
        "design_effect": round(design_effect, 3),
        "num_items": number,
        "routes": routes,
    }


def filled_in_by(study: Study, seeds: Mapping[str, Any]) -> dict[str, Any]:
    """Makes that part from the results of a pilot.

    Args:
        study: What the pilot was run with.
        seeds: What pilot.json holds of each seed.
    """
    return filled_in(
        study,
        pilot=pilot_digest(seeds),
        dz=float(np.median([one["primary"]["dz"] for one in seeds.values()])),
        design_effect=float(np.median([one["design_effect"] for one in seeds.values()])),
        routes={seed: one["routes"] for seed, one in seeds.items()},
    )


def preregistered(path: Path, study: Study, *, pilot: Path | None = None) -> Preregistration:
    """Reads the document, and refuses one that was not committed as it is, or does not fit the study.

    Args:
        path: Of the document, in a git repository.
        study: What will be run.
        pilot: Of pilot.json; where there is one, what it filled in must be what it fills in.

    Raises:
        ConfigError: It is missing, not filled in, not committed, changed since, for another study, plans too few
            items, names routes that the model does not have, or was filled in by hand.
    """
    if not path.is_file():
        raise ConfigError(got=f"no {path}", expected="the preregistration", do="write it before the run")
    commit = _committed(path)
    content = path.read_bytes()
    found = _facts(path, content.decode("utf-8"))
    empty = [name for name in FILLED_IN if found.get(name) is None]
    if empty:
        raise ConfigError(
            got=f"{path} without {', '.join(empty)}",
            expected="what the pilot fills in",
            do="attnres study contradiction --stage pilot prints it; put it in, and commit",
        )
    check_filled_in(path, found)
    if found["study"] != digest(encode(study)):
        raise ConfigError(
            got=f"{path} for the study {found['study'][:12]}, and this one is {digest(encode(study))[:12]}",
            expected="the study that the pilot was run with",
            do="run it with the same config, or run the pilot again and write another preregistration",
        )
    needed = math.ceil(needed_items(found["planned_dz"], alpha=ALPHA) * found["design_effect"])
    if found["num_items"] < needed:
        raise ConfigError(
            got=f"{found['num_items']} items for an effect of dz {found['planned_dz']:g}",
            expected=f"{needed} items or more: 80 % power at alpha {ALPHA:g}, with a design effect of "
            f"{found['design_effect']:g}",
            do=f"put back the block that --stage pilot prints, which plans {needed - found['num_items']} more items",
        )
    check_routes(path, found["routes"], study)
    if pilot is not None and pilot.is_file():
        _check_pilots_block(path, found, pilot, study)
    routes = {seed: tuple(one) for seed, one in found["routes"].items()}
    return Preregistration(
        hashlib.sha256(content).hexdigest(), commit, found["num_items"], routes, found["pilot"]
    )


def pilot_digest(seeds: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a pilot's results, by which a document knows which pilot filled it in.

    Which code measured them is left out: other code that finds the very same makes no other pilot.

    Args:
        seeds: What pilot.json holds of each seed.

    Example:
        >>> one = {"behaviour": {"code": "a", "answers": 0.9}, "routes": []}
        >>> other = {"behaviour": {"code": "b", "answers": 0.9}, "routes": []}
        >>> pilot_digest({"0": one}) == pilot_digest({"0": other})
        True
    """
    told = {}
    for seed, one in seeds.items():
        behaviour = {name: value for name, value in one["behaviour"].items() if name != "code"}
        told[seed] = {**one, "behaviour": behaviour}
    return digest(told)


def checked_pilot(path: Path, agreed: Preregistration) -> str:
    """Checks that a pilot is the one that filled in the preregistration, where its results are still there.

    Args:
        path: Of pilot.json.
        agreed: The preregistration.

    Returns:
        What was checked, in words.

    Raises:
        ConfigError: Another pilot.
    """
    if not path.is_file():
        return (
            f"no {path.name} in {path.parent}: going on with what the preregistration says of it, unchecked; "
            "attnres study contradiction --stage pilot makes it again"
        )
    found = pilot_digest(read_json(path, newest=1)["seeds"])
    if found != agreed.pilot:
        raise ConfigError(
            got=f"{path} with results {found[:12]}, and a preregistration from {agreed.pilot[:12]}",
            expected="the pilot that filled in the preregistration",
            do="put back the pilot.json that did; or put the block that --stage pilot prints into the document "
            "and commit it with the reason, before anything is confirmed",
        )
    return f"{path.name} is the pilot that filled in the preregistration"


def _check_pilots_block(path: Path, found: Mapping[str, Any], pilot: Path, study: Study) -> None:
    difference = first_difference(found, filled_in_by(study, read_json(pilot, newest=1)["seeds"]))
    if difference is not None:
        raise ConfigError(
            got=f"{path} and {pilot}, where {difference}",
            expected="the very block that the pilot's results give",
            do="put the block that --stage pilot prints into the document and commit it with the reason, before "
            "anything is confirmed; or put back the pilot.json that filled it in",
        )


def _facts(path: Path, text: str) -> dict[str, Any]:
    blocks = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        raise ConfigError(
            got=f"{path} with {len(blocks)} JSON blocks", expected="one", do="put the pilot's block in"
        )
    try:
        facts = json.loads(blocks[0])
    except json.JSONDecodeError as error:
        raise ConfigError(
            got=f"{path}: {error}", expected="JSON", do="copy the pilot's block again"
        ) from error
    if not isinstance(facts, dict):
        raise ConfigError(
            got=f"{path} with a {type(facts).__name__} in its block",
            expected="an object, with study, pilot, routes and so on",
            do="copy the pilot's block again",
        )
    return facts


def _committed(path: Path) -> str:
    """Returns the commit that holds the document as it is."""

    def told(*arguments: str) -> str | None:
        return git(path.resolve().parent, *arguments, "--", path.name, timeout=30.0)

    commit = told("log", "-1", "--format=%H")
    if not commit or not told("ls-files", "--error-unmatch"):
        raise ConfigError(
            got=f"{path}, which is not committed",
            expected="a document that git knows, so that its time is known, too",
            do="git add it, commit, and start again",
        )
    if told("status", "--porcelain") != "":
        raise ConfigError(
            got=f"{path}, which differs from what was committed",
            expected="the committed document",
            do="commit the change with its reason, or undo it",
        )
    return commit

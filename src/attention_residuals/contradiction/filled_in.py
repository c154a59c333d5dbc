"""What the pilot puts into the preregistration: the right types, and routes that the model has."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_residuals.contradiction.study import Study
from attention_residuals.errors import ConfigError, is_count, nearest
from attention_residuals.trace.sweeps import reads_of
from attention_residuals.train.trainer import initial_model

__all__ = ["check_filled_in", "check_routes"]


def check_filled_in(path: Path, found: Mapping[str, Any]) -> None:
    """Refuses a block with values of another type than the pilot writes.

    Args:
        path: Of the document.
        found: The block, with every name.

    Raises:
        ConfigError: A value of another type, or out of range.
    """
    texts = {name: isinstance(found[name], str) for name in ("study", "pilot")}
    numbers = {name: _is_number(found[name]) for name in ("pilot_dz", "planned_dz", "design_effect")}
    above = {name: fits and found[name] > 0 for name, fits in numbers.items() if name != "pilot_dz"}
    for kind, fitting in (
        ("a text", texts),
        ("a number", numbers),
        ("a number above 0", above),
        ("a whole number, 1 or more", {"num_items": is_count(found["num_items"])}),
        ("lists of routes by seed, none of them empty", {"routes": _are_routes(found["routes"])}),
    ):
        for name, fits in fitting.items():
            if not fits:
                raise ConfigError(
                    got=f"{path} with {name}={found[name]!r}",
                    expected=kind,
                    do="put in the block that --stage pilot prints, and commit",
                )


def check_routes(path: Path, routes: Mapping[str, list[str]], study: Study) -> None:
    """Refuses routes of other seeds than the study's, and routes that its Block model does not have.

    Args:
        path: Of the document.
        routes: By seed.
        study: What will be run.

    Raises:
        ConfigError: Such routes.
    """
    wanted = [str(seed) for seed in study.seeds]
    if sorted(routes) != sorted(wanted):
        raise ConfigError(
            got=f"{path} with routes of the seeds {', '.join(routes) or 'none'}",
            expected=f"those of {', '.join(wanted)}",
            do="put in the block that --stage pilot prints, and commit",
        )
    model = initial_model(study.train_config("block", study.seeds[0]))
    known = [
        f"{read.site} < {source}"
        for read in reads_of(model)
        if len(read.sources) > 1
        for source in read.sources
    ]
    for seed, own in routes.items():
        for route in own:
            if route not in known:
                raise ConfigError(
                    got=f"{path} with the route {route!r} of seed {seed}",
                    expected="routes of the Block model",
                    do=nearest(route, known),
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_routes(routes: Any) -> bool:
    return (
        isinstance(routes, dict)
        and bool(routes)
        and all(isinstance(own, list) and own for own in routes.values())
        and all(isinstance(route, str) for own in routes.values() for route in own)
    )

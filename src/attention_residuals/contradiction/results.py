"""confirm.json read back: whose results they are, and what of an older format may still be shown."""

from pathlib import Path
from typing import Any

from attention_residuals.configs import encode
from attention_residuals.contradiction.controls import ACROSS, across_told, surprise_told
from attention_residuals.contradiction.study import Study, digest
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import read_json

__all__ = ["FORMAT", "read_results"]

FORMAT = 2
"""Of confirm.json. Format 1 scored verdicts on corrected claims by the planted claim alone, shuffled single items,
gave matches of other items a p, and kept no gate of a Full model whose Block model fails."""


def read_results(path: Path, study: Study) -> dict[str, Any]:
    """Reads confirm.json, and takes out of format 1 what is not what it says.

    Args:
        path: Of confirm.json.
        study: Whose results they must be.

    Raises:
        ConfigError: It holds the results of another study.
        CheckpointError: It is damaged.
    """
    result = read_json(path, newest=FORMAT)
    theirs, ours = str(result.get("study")), digest(encode(study))
    if theirs != ours:
        raise ConfigError(
            got=f"{path} with results of the study {theirs[:12]}",
            expected=f"results of this one, {ours[:12]}",
            do="pass the study.json that they were made with as --config, or confirm this study in a folder of its own",
        )
    if result["format"] == 1:
        for one in result["seeds"].values():
            _mend(one)
    return result


def _mend(one: dict[str, Any]) -> None:
    """Brings what format 1 holds of a seed into the shape of format 2; what it lacks or got wrong is None."""
    for family in one["behaviour"]["accuracy"]["corrected"].values():
        family["verdict"] = None
    routing = one["routing"]
    one["missing"], one["full_gate"] = None, None
    if routing is None:
        return
    failures = routing.pop("full_failures")
    one["full_gate"] = {"passed": not failures, "failures": failures, "model": routing.pop("full_model")}
    routing["profile_intervals"] = None
    _mend_controls(routing)


def _mend_controls(routing: dict[str, Any]) -> None:
    controls = routing["controls"]
    surprise = controls["surprise-matched"]
    if "effect" in surprise["numbers"]:
        surprise["found"] = surprise_told(surprise["numbers"])
    shuffled = controls["labels shuffled"]
    shuffled["found"] += " (by single items, where the primary test turns whole templates: not judged)"
    shuffled["holds"] = None
    shuffled["numbers"]["reach by single items"] = shuffled["numbers"].pop("reach")
    across = controls["matches of other items"]
    del across["numbers"]["p"]
    across["numbers"] |= {f"{end} within items": routing["primary"][end] for end in ("low", "high")}
    across["expected"], across["found"] = ACROSS, across_told(across["numbers"])

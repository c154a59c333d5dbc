"""The command that runs a whole study."""

from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from attention_residuals.cli.app import INTERRUPTED, Device, app
from attention_residuals.cli.names import device_of
from attention_residuals.contradiction import Study, run_study, study_of
from attention_residuals.models.weights import read_json

__all__ = ["study_command"]


@app.command(name="study")
def study_command(
    name: Positional[Literal["contradiction"]],
    folder: Path = Path("runs/contradiction"),
    stage: Literal["train", "pilot", "confirm", "report"] | None = None,
    preregistration: Path = Path("studies/contradiction/preregistration.md"),
    config: Path | None = None,
    device: Device = "auto",
) -> int:
    """Run a study from its models to its report, or go on where an earlier call stopped.

    contradiction: does a model look back when a step contradicts an earlier one? It trains the models, runs
    a pilot that says how many items are needed, tests what was preregistered once that is committed, and
    writes report.html, claims.yaml, tables/ (CSV) and figures/ (PNG and SVG).

    For example:
      attnres study contradiction --stage train
      attnres study contradiction --stage pilot
      attnres study contradiction

    Args:
        name: Of the study.
        folder: Receives models, measurements, results and report.
        stage: train, pilot, confirm or report; by default all in order.
        preregistration: The document that must be committed, unchanged, before the confirming run.
        config: The study.json of another folder, to run another study than the one of this package.
        device: auto is cuda where there is one.
    """
    study = Study() if config is None else study_of(read_json(config, newest=1)["study"])
    is_done = run_study(study, folder, preregistration, stage=stage, device=device_of(device))
    return 0 if is_done else INTERRUPTED

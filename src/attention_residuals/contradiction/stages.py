"""The study in four stages, each of which goes on where it stopped: train, pilot, confirm, report."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from attention_residuals.configs import encode
from attention_residuals.contradiction.claims import primary_of
from attention_residuals.contradiction.controls import Evidence
from attention_residuals.contradiction.effects import (
    Finding,
    design_effect,
    finding,
    over_seeds,
    primary_effects,
)
from attention_residuals.contradiction.findings import (
    behaviour_of,
    causes_of,
    chosen_routes,
    plain,
    routing_of,
)
from attention_residuals.contradiction.measurement import Measured, code_digest, equal_shaped, measured_once
from attention_residuals.contradiction.models import MADE, model_of, train_models, unfinished
from attention_residuals.contradiction.preregistration import (
    Preregistration,
    checked_pilot,
    filled_in_by,
    preregistered,
)
from attention_residuals.contradiction.report import write_report
from attention_residuals.contradiction.results import FORMAT
from attention_residuals.contradiction.study import ITEM_SETS, Study, digest, least_items
from attention_residuals.data.synthetic import Item
from attention_residuals.data.synthetic.problems import Split
from attention_residuals.durable import write_bytes, write_new
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import read_json
from attention_residuals.trace import dataset_mean
from attention_residuals.train.config import first_difference

__all__ = ["STAGES", "Stage", "claim_folder", "confirm", "pilot", "run_study"]

Stage = Literal["train", "pilot", "confirm", "report"]
STAGES: tuple[Stage, ...] = ("train", "pilot", "confirm", "report")


def run_study(
    study: Study,
    folder: Path,
    preregistration: Path,
    *,
    stage: Stage | None = None,
    progress: bool = True,
    device: str = "cpu",
) -> bool:
    """Runs one stage, or all from where an earlier call stopped.

    Args:
        study: What to run; a folder is for one study only.
        folder: Receives study.json, corpus/, models/, trained/, measured/, pilot.json, confirm.json, claims.yaml,
            tables/, figures/ and report.html.
        preregistration: The document that must be committed before the confirming run.
        stage: One of ``STAGES``; None runs them in order.
        progress: Say on stderr what is done.
        device: Where models run.

    Returns:
        Whether it is finished; False where a signal stopped the training, and the same call goes on.

    Raises:
        ConfigError: The folder is another study's, or the preregistration does not hold, or is another pilot's.
        CheckpointError: A model is not trained yet.
    """
    claim_folder(study, folder)
    note: Callable[[str], None] = (
        (lambda text: print(text, file=sys.stderr)) if progress else (lambda _: None)
    )
    for one in STAGES if stage is None else (stage,):
        if one == "train":
            if not train_models(study, folder, progress=progress, device=device):
                return False
        elif one == "pilot":
            found = pilot(study, folder, note=note, device=device)
            note("for the preregistration:\n```json\n" + json.dumps(found["filled_in"], indent=1) + "\n```")
        elif one == "confirm":
            agreed = preregistered(preregistration, study, pilot=folder / "pilot.json")
            note(f"preregistration {agreed.sha256}, committed in {agreed.commit[:12]}")
            confirm(study, folder, agreed, note=note, device=device)
        else:
            write_report(study, folder, device=device)
            note(f"report in {folder / 'report.html'}, claims in {folder / 'claims.yaml'}")
            note(f"tables in {folder / 'tables'}, figures in {folder / 'figures'}")
    return True


def claim_folder(study: Study, folder: Path) -> None:
    """Makes a folder this study's, or checks that it is.

    Raises:
        ConfigError: It is another study's.
    """
    path = folder / "study.json"
    ours = {"format": 1, "study": encode(study)}
    if not path.exists():
        write_new(path, (json.dumps(ours, indent=1) + "\n").encode())
    difference = first_difference(read_json(path, newest=1), json.loads(json.dumps(ours)))
    if difference is not None:
        raise ConfigError(
            got=f"{folder}, where {difference}",
            expected="a folder of this very study",
            do="name another folder",
        )


def pilot(
    study: Study, folder: Path, *, note: Callable[[str], None] = lambda _: None, device: str = "cpu"
) -> dict[str, Any]:
    """Measures pilot items, chooses routes, and says how many items a confirming run needs.

    Args:
        study: What was trained.
        folder: Receives pilot.json.
        note: Is told what is done.
        device: Where models run.

    Returns:
        What pilot.json holds; ``filled_in`` is for the preregistration.
    """
    seeds: dict[str, Any] = {}
    names = ("main", "distance 1", "distance 3")
    for seed in study.seeds:
        note(f"pilot: seed {seed}")
        numbers = dict.fromkeys(names, study.pilot_items)
        key = [encode(study), seed, code_digest()]
        run = partial(_piloted, study, folder, seed, numbers, device)
        seeds[str(seed)] = _once(folder / "pilot", key, run)
    result = {"format": 1, "seeds": seeds, "filled_in": filled_in_by(study, seeds)}
    write_bytes(folder / "pilot.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def confirm(
    study: Study,
    folder: Path,
    agreed: Preregistration,
    *,
    note: Callable[[str], None] = lambda _: None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measures the confirming items and tests what was preregistered.

    Args:
        study: What was trained.
        folder: Receives confirm.json.
        agreed: The preregistration.
        note: Is told what is done.
        device: Where models run.

    Returns:
        What confirm.json holds.

    Raises:
        ConfigError: There is a pilot.json, and it is not the pilot that filled in the preregistration.
    """
    note(checked_pilot(folder / "pilot.json", agreed))
    numbers = {**least_items(study), "main": agreed.num_items}
    seeds: dict[str, Any] = {}
    for seed in study.seeds:
        note(f"confirm: seed {seed}")
        key = [encode(study), agreed.sha256, seed, code_digest(), unfinished(study, folder, seed)]
        seeds[str(seed)] = _once(
            folder / "confirm",
            key,
            partial(_confirmed, study, folder, agreed, seed, numbers, device),
        )
    passing = {seed: one for seed, one in seeds.items() if one["routing"] is not None}
    together: dict[str, Any] = {}
    for name in ("primary", "full"):
        found = primary_of(passing, name).values()
        together[name] = plain(over_seeds([Finding(**one) for one in found])) if found else None
    result = {
        "format": FORMAT,
        "preregistration": agreed._asdict(),
        "study": digest(encode(study)),
        "seeds": seeds,
        "over_seeds": together,
    }
    write_bytes(folder / "confirm.json", (json.dumps(plain(result), indent=1) + "\n").encode())
    return dict(plain(result))


def _piloted(
    study: Study, folder: Path, seed: int, numbers: Mapping[str, int], device: str
) -> dict[str, Any]:
    """Measures pilot items on one seed, and chooses its routes."""
    sets, model, items = _block_sets(study, folder, "pilot", seed, numbers, device)
    _, told = behaviour_of(sets, num_draws=study.num_draws)
    main, tried = sets["main"], items["main"][: study.causal_items]
    effects = primary_effects(main)
    return {
        "behaviour": told,
        "primary": finding(effects, main.clusters, num_draws=study.num_draws),
        "design_effect": design_effect(effects, main.clusters),
        "routes": chosen_routes(model, tried, main, study.num_routes),
    }


def _confirmed(
    study: Study, folder: Path, agreed: Preregistration, seed: int, numbers: Mapping[str, int], device: str
) -> dict[str, Any]:
    """Measures and tests one seed; of a model that fails the gate nothing more is measured, a Full one too."""
    sets, model, items = _block_sets(study, folder, "confirm", seed, numbers, device)
    passed, told = behaviour_of(sets, num_draws=study.num_draws)

    def on(arm: str) -> Measured:
        return measured_once(
            folder / "measured", model_of(study, folder, arm, seed).to(device), items["main"]
        )

    missing = unfinished(study, folder, seed)
    found: dict[str, Any] = {"behaviour": told, "full_gate": None, "missing": missing}
    found |= {"routing": None, "causes": None}
    full = on("full") if passed.is_passed or "full" not in missing else None
    if full is not None:
        _, found["full_gate"] = behaviour_of({"main": full}, num_draws=study.num_draws)
    if not passed.is_passed:
        return found
    models = {arm: on(arm) for arm in (*MADE, "standard")}
    means = dataset_mean(model, _texts(items["main"], device))
    models["static"] = measured_once(folder / "measured", model, items["main"], static=means)
    evidence = Evidence(sets, models, study.num_draws)
    found["routing"] = routing_of(evidence, full if found["full_gate"]["passed"] else None)
    found["causes"] = causes_of(study, model, items["main"], sets["main"], agreed.routes[str(seed)])
    return found


def _block_sets(
    study: Study, folder: Path, split: Split, seed: int, numbers: Mapping[str, int], device: str
) -> tuple[dict[str, Measured], Any, dict[str, tuple[Item, ...]]]:
    """Measures sets of items on the Block model of a seed."""
    model = model_of(study, folder, "block", seed).to(device)
    items = {name: study.items(split, name, numbers[name]) for name in ITEM_SETS if name in numbers}
    sets = {name: measured_once(folder / "measured", model, own) for name, own in items.items()}
    return sets, model, items


def _texts(items: Sequence[Item], device: str) -> Iterator[torch.Tensor]:
    for _, group in equal_shaped(items):
        ids = torch.from_numpy(np.stack([item.ids for item in group]))
        yield ids.flatten(0, 2).to(device)


def _once(folder: Path, key: list[Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Computes a result, or reads what an earlier call computed from the same."""
    path = folder / f"{digest(key)[:16]}.json"
    if not path.exists():
        write_new(path, (json.dumps({"format": 1, **plain(compute())}, indent=1) + "\n").encode())
    return {name: value for name, value in read_json(path, newest=1).items() if name != "format"}

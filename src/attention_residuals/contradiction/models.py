"""The models of the study: three trained arms for each seed, and two that are made without training."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from attention_residuals.configs import encode
from attention_residuals.contradiction.study import ARMS, Study
from attention_residuals.data import Corpus, prepare
from attention_residuals.data.synthetic import step_tokenizer
from attention_residuals.durable import locked, write_bytes
from attention_residuals.errors import CheckpointError
from attention_residuals.models import LanguageModel
from attention_residuals.models.weights import load_model, read_json, save_model
from attention_residuals.train import Saving, load_checkpoint_model, train
from attention_residuals.train.config import first_difference
from attention_residuals.train.trainer import initial_model

__all__ = [
    "MADE",
    "model_of",
    "prepared_corpus",
    "run_folder",
    "train_models",
    "trained_folder",
    "unfinished",
]

MADE = ("zero-query", "untrained")
"""Models that need no training: the Block one with all pseudo-queries 0, and the Block one as it starts."""


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Names the folder of one run."""
    return folder / "models" / f"{arm}-{seed}"


def trained_folder(folder: Path, arm: str, seed: int) -> Path:
    """Names the folder of one trained model: config.json, model.safetensors and train.json, how it was trained."""
    return folder / "trained" / f"{arm}-{seed}"


def prepared_corpus(study: Study, folder: Path) -> Corpus:
    """Prepares the training texts, or opens them.

    Raises:
        ConfigError: The folder holds other texts.
    """
    return prepare(study.documents, folder / "corpus", tokenizer=step_tokenizer())


def train_models(
    study: Study, folder: Path, *, progress: bool = True, device: str = "cpu", saving: Saving | None = None
) -> bool:
    """Trains every arm with every seed, or goes on where an earlier call stopped.

    Calls at the same time share the work: each takes models that no other process trains. So two calls with
    one thread each use two cores best.

    Args:
        study: What to train.
        folder: Receives corpus/, models/ with one folder for each run, and trained/ with one for each model that
            is done. A model that lies there, from another machine say, is not trained again.
        progress: Show on stderr what is trained, and how much time is left.
        device: Where to train.
        saving: When to save and evaluate; default every 100 and every 250 steps.

    Returns:
        Whether all are trained; False where a signal stopped one, or another process still trains some, and
        the same call goes on.

    Raises:
        CheckpointError: A folder holds another run.
    """
    saving = saving or Saving(every=100, keep=1, evaluate_every=250, evaluate_batches=16, log_every=10)
    runs = [(arm, seed) for seed in study.seeds for arm in ARMS if not _is_trained(study, folder, arm, seed)]
    corpus = prepared_corpus(study, folder) if runs else None
    spent: list[float] = []
    elsewhere: list[str] = []
    for number, (arm, seed) in enumerate(runs):
        place, config = run_folder(folder, arm, seed), study.train_config(arm, seed)
        with locked(folder / "locks" / f"{place.name}.lock") as is_ours:
            if not is_ours:
                elsewhere.append(place.name)
                continue
            if _is_trained(study, folder, arm, seed):  # by another process meanwhile
                continue
            if progress:
                left = sum(spent) / len(spent) * (len(runs) - number) if spent else None
                known = f", about {left / 60:.0f} minutes for the rest" if left is not None else ""
                print(f"model {number + 1} of {len(runs)}: {arm}, seed {seed}{known}", file=sys.stderr)
            begin = time.perf_counter()
            assert corpus is not None
            if train(config, corpus, place, saving=saving, progress=progress, device=device).interrupted:
                return False
            spent.append(time.perf_counter() - begin)
            _keep(study, folder, arm, seed)
    if not runs and progress:
        print(f"all {len(ARMS) * len(study.seeds)} models are trained", file=sys.stderr)
    if elsewhere and spent:  # while this call trained, others may have got ready
        return train_models(study, folder, progress=progress, device=device, saving=saving)
    if elsewhere and progress:
        print(f"another process trains {', '.join(elsewhere)}; call again when it is done", file=sys.stderr)
    return not elsewhere


def unfinished(study: Study, folder: Path, seed: int) -> list[str]:
    """Names the arms of a seed that are not trained to their end in this folder.

    Raises:
        CheckpointError: The folder holds another run.
    """
    return [arm for arm in ARMS if not _is_trained(study, folder, arm, seed)]


def model_of(study: Study, folder: Path, arm: str, seed: int) -> LanguageModel:
    """Opens a trained model, or makes one of ``MADE`` from the Block one.

    Args:
        study: What was trained.
        folder: Of the study.
        arm: One of ``ARMS`` or ``MADE``.
        seed: Of the run.

    Raises:
        CheckpointError: The run is missing or not finished.
    """
    trained = "block" if arm in MADE else arm
    config = study.train_config(trained, seed)
    if arm == "untrained":
        return initial_model(config).requires_grad_(False)
    if not _is_trained(study, folder, trained, seed):
        raise CheckpointError(
            got=f"no model in {trained_folder(folder, trained, seed)}",
            expected=f"one that was trained for {config.num_steps} steps",
            do="attnres study contradiction --stage train, which goes on where it stopped",
        )
    model = load_model(trained_folder(folder, trained, seed)).requires_grad_(False)
    if arm == "zero-query":
        for name, parameter in model.named_parameters():
            if name.endswith("pseudo_query"):
                parameter.zero_()
    return model


def _described(study: Study, arm: str, seed: int) -> dict[str, Any]:
    """What a model is known by: how it was trained, and on which texts."""
    told = {"train": encode(study.train_config(arm, seed)), "documents": encode(study.documents)}
    return {"format": 1, **json.loads(json.dumps(told))}


def _keep(study: Study, folder: Path, arm: str, seed: int) -> None:
    """Puts the model of a finished run where ``model_of`` finds it, whole or not at all."""
    place = trained_folder(folder, arm, seed)
    partial = place.with_name(f".partial-{place.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    save_model(load_checkpoint_model(run_folder(folder, arm, seed)), partial)
    text = json.dumps(_described(study, arm, seed), indent=1)
    write_bytes(partial / "train.json", f"{text}\n".encode())
    partial.rename(place)


def _is_trained(study: Study, folder: Path, arm: str, seed: int) -> bool:
    """Whether the model is there.

    Raises:
        CheckpointError: Another one is.
    """
    place = trained_folder(folder, arm, seed)
    if not place.is_dir():
        return False
    difference = first_difference(read_json(place / "train.json", newest=1), _described(study, arm, seed))
    if difference is not None:
        raise CheckpointError(
            got=f"{place}, where {difference}", expected="a model of this very study", do="move it elsewhere"
        )
    return True

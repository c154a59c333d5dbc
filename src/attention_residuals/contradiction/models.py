"""The models of the study: three trained arms for each seed, and two that are made without training."""

import sys
import time
from pathlib import Path

from attention_residuals.contradiction.study import ARMS, Study
from attention_residuals.data import Corpus, prepare
from attention_residuals.data.synthetic import step_tokenizer
from attention_residuals.durable import locked
from attention_residuals.errors import CheckpointError
from attention_residuals.models import LanguageModel
from attention_residuals.train import Saving, load_checkpoint_model, newest_checkpoint, train
from attention_residuals.train.checkpoint import step_of
from attention_residuals.train.trainer import initial_model

__all__ = ["MADE", "model_of", "prepared_corpus", "run_folder", "train_models", "unfinished"]

MADE = ("zero-query", "untrained")
"""Models that need no training: the Block one with all pseudo-queries 0, and the Block one as it starts."""


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Names the folder of one run."""
    return folder / "models" / f"{arm}-{seed}"


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
        folder: Receives corpus/ and models/, with one folder for each run.
        progress: Show on stderr what is trained, and how much time is left.
        device: Where to train.
        saving: When to save and evaluate; default every 100 and every 250 steps.

    Returns:
        Whether all are trained; False where a signal stopped one, or another process still trains some, and
        the same call goes on.

    Raises:
        CheckpointError: A folder holds another run.
    """
    corpus = prepared_corpus(study, folder)
    saving = saving or Saving(every=100, keep=1, evaluate_every=250, evaluate_batches=16, log_every=10)
    runs = [(arm, seed) for seed in study.seeds for arm in ARMS]
    spent: list[float] = []
    elsewhere: list[str] = []
    for number, (arm, seed) in enumerate(runs):
        place, config = run_folder(folder, arm, seed), study.train_config(arm, seed)
        with locked(folder / "locks" / f"{place.name}.lock") as is_ours:
            if not is_ours:
                elsewhere.append(place.name)
                continue
            newest = newest_checkpoint(place, config) if place.is_dir() else None
            is_done = newest is not None and step_of(newest) == config.num_steps
            if progress:
                left = sum(spent) / len(spent) * (len(runs) - number) if spent else None
                known = f", about {left / 60:.0f} minutes for the rest" if left is not None else ""
                print(f"model {number + 1} of {len(runs)}: {arm}, seed {seed}{known}", file=sys.stderr)
            begin = time.perf_counter()
            if train(config, corpus, place, saving=saving, progress=progress, device=device).interrupted:
                return False
            spent += [] if is_done else [time.perf_counter() - begin]
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
    return [arm for arm in ARMS if _steps(study, folder, arm, seed) != study.train.num_steps]


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
    place = run_folder(folder, trained, seed)
    steps = _steps(study, folder, trained, seed)
    if steps != config.num_steps:
        raise CheckpointError(
            got=f"{place}, at {'no checkpoint' if steps is None else f'step {steps}'}",
            expected=f"a run of {config.num_steps} steps",
            do="attnres study contradiction --stage train, which goes on where it stopped",
        )
    model = load_checkpoint_model(place).requires_grad_(False)
    if arm == "zero-query":
        for name, parameter in model.named_parameters():
            if name.endswith("pseudo_query"):
                parameter.zero_()
    return model


def _steps(study: Study, folder: Path, arm: str, seed: int) -> int | None:
    place = run_folder(folder, arm, seed)
    newest = newest_checkpoint(place, study.train_config(arm, seed)) if place.is_dir() else None
    return None if newest is None else step_of(newest)

"""The process that does one run of a study; its arguments are the study's folder, the results, the run's name.

With ``--again``, a run that ended without numbers is done again.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attention_residuals.configs import decode, encode
from attention_residuals.data import Corpus
from attention_residuals.durable import locked, write_bytes
from attention_residuals.errors import CheckpointError, NonFiniteError, RankError
from attention_residuals.experiments.cell import Cell, Finished, digest_of
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.measures import MEASURES
from attention_residuals.experiments.results import DONE, Key, Number, Outcome, Results
from attention_residuals.models.weights import read_json
from attention_residuals.train import TRAIN_CONFIGS, load_checkpoint_model, load_run, train
from attention_residuals.train.execution import Executes, InProcess

__all__ = [
    "HELD",
    "STOPPED",
    "Doing",
    "corpus_folder",
    "do",
    "end_with_parent",
    "is_out_of_memory",
    "measured",
    "outcome_of",
    "read_cell",
    "run_folder",
    "trained",
    "work",
    "write_cell",
]

Doing = Callable[[Cell, Corpus, str, str], Outcome | None]
"""Does a run on its text, given its digest and where to train; None where a signal stopped it."""

HELD, STOPPED = 75, 130
"""Exit codes: another process has the run; a signal stopped it, and it goes on from its checkpoint."""


def run_folder(folder: Path, cell: Cell) -> Path:
    """Names the folder that a run is trained in."""
    return folder / "runs" / cell.name


def corpus_folder(folder: Path, text: str) -> Path:
    """Names the folder of a prepared text."""
    return folder / "corpora" / text


def write_cell(folder: Path, cell: Cell, corpus: Path, device: str = "cpu") -> None:
    """Writes a run down for its process.

    Args:
        folder: Of the study.
        cell: The run.
        corpus: The folder of its prepared text.
        device: Where to train.
    """
    path = folder / "cells" / f"{cell.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"format": 1, "corpus": str(corpus), "device": device, "cell": encode(cell)}
    write_bytes(path, (json.dumps(told, indent=1) + "\n").encode())


def read_cell(folder: Path, name: str) -> tuple[Cell, Path, str]:
    """Reads a run, where its text lies, and where to train.

    Raises:
        CheckpointError: There is none of that name.
    """
    path = folder / "cells" / f"{name}.json"
    told = read_json(path, newest=1)
    cell = decode(told.get("cell"), {**TRAIN_CONFIGS, **MEASURES, "Cell": Cell})
    if not isinstance(cell, Cell):
        raise CheckpointError(got=f"{path} without a cell", expected="a run of a study", do="start the study")
    return cell, Path(str(told["corpus"])), str(told["device"])


def work(folder: Path, results: Path, name: str, *, again: bool = False, doing: Doing | None = None) -> int:
    """Does one run unless another process has it or has done it.

    Args:
        folder: Of the study.
        results: The CSV file that its outcome is added to.
        name: Of the run, which ``write_cell`` wrote.
        again: Do it even if it ended without numbers before.
        doing: Does it; by default this process, alone.

    Returns:
        0 where the outcome is in the file, ``HELD`` or ``STOPPED``.
    """
    cell, place, device = read_cell(folder, name)
    with locked(folder / "locks" / f"{name}.lock") as is_ours:
        if not is_ours:
            return HELD
        corpus = Corpus.load(place)
        digest = digest_of(cell, corpus)
        before = Results(results).read().outcomes.get(cell.key)
        if before is not None and before.config == digest and (before.is_done or not again):
            return 0  # another process has done it since this one was sent
        if doing is None:
            outcome = do(cell, corpus, run_folder(folder, cell), digest, device=device)
        else:
            outcome = doing(cell, corpus, digest, device)
        if outcome is None:
            return STOPPED
        torn = Results(results).append(outcome)
        if torn is not None:
            print(f"cut off: {torn}")
    return 0


def do(cell: Cell, corpus: Corpus, folder: Path, digest: str, *, device: str = "cpu") -> Outcome | None:
    """Trains and measures, and turns what went wrong with the numbers or the memory into an outcome.

    Args:
        cell: What to do.
        corpus: Its text.
        folder: Of the run; where it has begun, it goes on.
        digest: Of the run, see ``digest_of``.
        device: Where to train.

    Returns:
        How it ended; None where a signal stopped it, and the same call goes on.

    Raises:
        CheckpointError: The folder holds another run, or cannot be written.
    """

    def numbers() -> list[Number] | None:
        is_finished = trained(cell, corpus, folder, device=device)
        return measured(cell, corpus, folder, device=device) if is_finished else None

    return outcome_of(cell.key, digest, numbers)


def outcome_of(key: Key, digest: str, numbers: Callable[[], Sequence[Number] | None]) -> Outcome | None:
    """Turns numbers, or what went wrong with them or with the memory, into an outcome.

    Args:
        key: Of the run.
        digest: Of the run.
        numbers: Finds them; None is handed on.
    """
    try:
        found = numbers()
    except NonFiniteError as error:
        return Outcome(key=key, config=digest, status=f"diverged: {error.got}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).splitlines()[0][:200]
        return Outcome(key=key, config=digest, status=f"out of memory: {told}")
    return None if found is None else Outcome(key=key, config=digest, status=DONE, numbers=tuple(found))


def trained(
    cell: Cell, corpus: Corpus, folder: Path, *, device: str = "cpu", executes: Executes = InProcess
) -> bool:
    """Trains a run, or goes on with it, and tells whether it has reached its last step; else a signal stopped it."""
    saving = cell.measure.saving(cell.train.num_steps)
    return not train(cell.train, corpus, folder, saving=saving, device=device, executes=executes).interrupted


def measured(cell: Cell, corpus: Corpus, folder: Path, *, device: str = "cpu") -> list[Number]:
    """Takes down of a run that is trained what the trainer measured, what it cost, and what its measure finds."""
    run = Finished(folder, cell.train, corpus, device)
    return [*_told_by_trainer(cell, folder), *cell.measure.numbers(run)]


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that this process has too little memory; on the CPU only its text does.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
        True
    """
    told = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, RankError)  # which tells what another process has said
        and any(words in str(error).lower() for words in told)
    )


def _told_by_trainer(cell: Cell, folder: Path) -> list[Number]:
    """Takes down what the trainer measured, and what it cost."""
    rows, model = load_run(folder).metrics, load_checkpoint_model(folder)
    numbers = [
        Number("parameters", sum(parameter.numel() for parameter in model.parameters())),
        Number("parameters of the rule", sum(parameter.numel() for parameter in model.residual.parameters())),
        Number("training tokens", cell.train.num_steps * cell.train.tokens_per_step),
        Number("training FLOP", training_flops(cell.train)),
        Number("training seconds", [row for row in rows if row["split"] == "train"][-1]["seconds"]),
    ]
    for row in rows:
        if row["split"] == "valid":
            numbers.append(Number("validation loss", row["loss"], row["step"]))
            numbers.append(Number("validation bits per byte", row["bits_per_byte"], row["step"]))
    return numbers


def end_with_parent() -> None:
    """Asks this process to save and stop as soon as the process that started it is gone."""

    def watch() -> None:
        # The descriptor itself: a thread that holds sys.stdin's lock makes Python abort at its end.
        while os.read(0, 1):
            pass  # nothing is ever sent: the read ends when the other end is closed, however that came about
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    torch.set_num_threads(1)
    raise SystemExit(
        work(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], again=sys.argv[4:] == ["--again"])
    )

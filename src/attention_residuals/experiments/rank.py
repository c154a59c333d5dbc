"""One rank of a run of a study, which ``experiments.torchrun`` starts, and which writes down how it ended.

Its arguments are how the ranks share the work (JSON), the study's folder, the run's name, and torchrun's process.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attention_residuals.configs import decode
from attention_residuals.data import Corpus
from attention_residuals.durable import write_bytes
from attention_residuals.errors import AttentionResidualsError, RankError
from attention_residuals.experiments.cell import Cell, digest_of
from attention_residuals.experiments.results import Number
from attention_residuals.experiments.worker import (
    is_out_of_memory,
    measured,
    outcome_of,
    read_cell,
    run_folder,
    trained,
)
from attention_residuals.parallel.config import Parallel

__all__ = ["do_as_rank", "end_of_ranks", "main"]


def end_of_ranks(folder: Path, name: str) -> Path:
    """Names the folder in which ranks write down how they ended; not the run's, which holds nothing but the run."""
    return folder / "ended" / name


def do_as_rank(folder: Path, name: str, parallel: Parallel) -> int:
    """Trains a run together with the other ranks; the lead then measures it, alone.

    A rank whose outcome or error is its own writes it to rank-N.json: ``status`` and ``numbers``, or ``error``; one
    that only waited for another writes ``waited``.

    Args:
        folder: Of the study.
        name: Of the run.
        parallel: How they share the work.

    Returns:
        The exit code: 1 where there are no numbers, which makes torchrun end the others.
    """
    path = end_of_ranks(folder, name) / f"rank-{os.environ['RANK']}.json"
    try:
        cell, place, device = read_cell(folder, name)
        corpus = Corpus.load(place)
        outcome = outcome_of(
            cell.key,
            digest_of(cell, corpus),
            lambda: _numbers(cell, corpus, run_folder(folder, cell), parallel, device),
        )
    except BaseException as error:
        text = error.got if isinstance(error, AttentionResidualsError) else str(error)
        line = f"{type(error).__name__}: {' '.join(text.split())[:300]}"
        _write(path, {"waited" if isinstance(error, RankError) else "error": line})
        raise
    if outcome is None:  # stopped, or not the lead
        return 0
    _write(path, {"status": outcome.status, "numbers": outcome.numbers})
    return 0 if outcome.is_done else 1


def _numbers(
    cell: Cell, corpus: Corpus, folder: Path, parallel: Parallel, device: str
) -> Sequence[Number] | None:
    if parallel.num_ranks == 1:
        is_finished, is_lead = trained(cell, corpus, folder, device=device), True
    else:
        # PyTorch's distributed engine takes seconds to import, which a single process need not wait for.
        from attention_residuals.parallel.launch import launched
        from attention_residuals.parallel.training import executes

        with launched(parallel, device) as ranks:
            try:
                is_finished = trained(cell, corpus, folder, device=device, executes=executes(ranks))
            except RuntimeError as error:
                if is_out_of_memory(error):  # as a RuntimeError it might have begun on another rank
                    raise MemoryError(str(error)) from error
                raise
            is_lead = ranks.is_lead
    # The others do not wait: they could not for longer than their timeout.
    return measured(cell, corpus, folder, device=device) if is_finished and is_lead else None


def _write(path: Path, told: dict[str, Any]) -> None:
    write_bytes(path, (json.dumps(told) + "\n").encode())


def _die_with(parent: int) -> None:
    """Ends this process as soon as torchrun is gone, which keeps the ranks together and has the run's lock."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Does what the arguments say, and returns the exit code."""
    _die_with(int(sys.argv[4]))
    torch.set_num_threads(1)
    parallel = decode(json.loads(sys.argv[1]), {"Parallel": Parallel})
    return do_as_rank(Path(sys.argv[2]), sys.argv[3], parallel)


if __name__ == "__main__":
    raise SystemExit(main())

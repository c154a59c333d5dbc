"""The process that does one run of a study on several ranks: it is torchrun, and writes down what they found.

Its arguments are how the ranks share the work (JSON), then those of ``worker``. It holds the run's lock, and tells its
end by the same exit codes.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from attention_residuals.configs import decode, encode
from attention_residuals.data import Corpus
from attention_residuals.experiments.cell import Cell
from attention_residuals.experiments.rank import end_of_ranks
from attention_residuals.experiments.results import Number, Outcome
from attention_residuals.experiments.worker import Doing, end_with_parent, work
from attention_residuals.parallel.config import Parallel

__all__ = ["RANK", "SECONDS_TO_SAVE", "doing_on_ranks", "main"]

RANK = f"{__package__}.rank"
"""The module that each rank runs."""

SECONDS_TO_SAVE = 300
"""How long ranks that are asked to stop may take to finish their step and save; then they are killed."""


def doing_on_ranks(folder: Path, parallel: Parallel) -> Doing:
    """Makes what does a run on several ranks.

    Args:
        folder: Of the study.
        parallel: How they share the work.
    """

    def doing(cell: Cell, corpus: Corpus, digest: str, device: str) -> Outcome | None:
        place = end_of_ranks(folder, cell.name)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        failed = _run(folder, cell.name, parallel)
        told = _told(place)
        for one in told:
            if "status" in one:
                numbers = tuple(Number(*number) for number in one["numbers"])
                return Outcome(key=cell.key, config=digest, status=one["status"], numbers=numbers)
        if failed is None and not told:
            return None
        raise SystemExit(_why(told, failed))

    return doing


def _run(folder: Path, name: str, parallel: Parallel) -> ChildFailedError | None:
    """Is torchrun: starts the ranks and waits for all of them; hands signals on to them."""
    with TemporaryDirectory() as logs:
        words = [
            "--standalone",
            f"--nproc-per-node={parallel.num_ranks}",
            f"--shutdown-timeout={SECONDS_TO_SAVE}",
            f"--log-dir={logs}",
            "--module",
            RANK,
            json.dumps(encode(parallel)),
            str(folder),
            name,
            str(os.getpid()),
        ]
        try:
            run(parse_args(words))
        except ChildFailedError as error:
            return error
        except SignalException:
            pass  # the ranks have been told, and have ended
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # what they found is written down first
    return None


def _told(place: Path) -> list[dict[str, Any]]:
    """Reads how ranks ended, the first one first; those that only waited for another come last."""
    paths = sorted(place.glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda told: "waited" in told)


def _why(told: list[dict[str, Any]], failed: ChildFailedError | None) -> int | str:
    """Says why there is no outcome: by the exit code of a process that was killed, or in words."""
    failures = {} if failed is None else failed.failures
    killed = [rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGKILL]
    if killed and not any("error" in one for one in told):
        print(f"rank {killed[0]} was killed", file=sys.stderr)
        return 128 + signal.SIGKILL
    if told:
        return str(told[0].get("error", told[0].get("waited")))
    codes = ", ".join(f"rank {rank} by exit code {failure.exitcode}" for rank, failure in failures.items())
    return f"ended without a word: {codes}"


def main() -> int:
    """Does what the arguments say, and returns the exit code."""
    end_with_parent()
    parallel = decode(json.loads(sys.argv[1]), {"Parallel": Parallel})
    folder, results, name = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    again = sys.argv[5:] == ["--again"]
    return work(folder, results, name, again=again, doing=doing_on_ranks(folder, parallel))


if __name__ == "__main__":
    raise SystemExit(main())

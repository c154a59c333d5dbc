"""A queue of runs over worker processes, which can be stopped at any moment and goes on where it was."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from attention_residuals.data import Corpus
from attention_residuals.errors import ConfigError, is_count
from attention_residuals.experiments.cell import Cell, digest_of
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.launchers import Launcher, OneProcess
from attention_residuals.experiments.results import Key, Outcome, Results, Table
from attention_residuals.experiments.worker import HELD, STOPPED, run_folder, write_cell
from attention_residuals.train.checkpoint import checkpoints, step_of
from attention_residuals.train.metrics import read_rows
from attention_residuals.train.signals import StopSignals

__all__ = ["QueueEnd", "run_queue"]

SECONDS_BETWEEN_LINES = 30.0

SECONDS_BETWEEN_LOOKS = 0.1


class QueueEnd(NamedTuple):
    """How a call of ``run_queue`` ended."""

    is_finished: bool
    """Every run has an outcome in the file."""
    is_interrupted: bool
    crashed: Mapping[str, str]
    """By name, the last line of runs that ended in an error which is no outcome; the next call tries again."""
    elsewhere: tuple[str, ...]
    """Names of runs that another process has at this moment."""


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begin_step: int

    def close(self) -> None:
        """Waits for the process, and closes what leads to it."""
        self.process.wait()
        self.log.close()
        assert self.process.stdin is not None
        self.process.stdin.close()


@dataclass
class _Queue:
    """What ``run_queue`` knows while it runs."""

    folder: Path
    results: Results
    corpora: Mapping[str, Corpus]
    launcher: Launcher
    note: Callable[[str], None]
    redo: set[Key] = field(default_factory=set)
    running: dict[str, _Running] = field(default_factory=dict)
    deaths: dict[str, list[int]] = field(default_factory=dict)
    crashed: dict[str, str] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    work_done: float = 0.0
    begin: float = field(default_factory=time.monotonic)
    is_stopping: bool = False

    def waiting(self, cells_of: Callable[[Table], tuple[Cell, ...]]) -> list[Cell]:
        """Lists the runs that are to be started, and checks the outcomes of the others.

        Raises:
            ConfigError: An outcome is of another config or text.
        """
        table, left = self.results.read(), []
        for cell in cells_of(table):
            outcome = table.outcomes.get(cell.key)
            if outcome is not None and cell.key not in self.redo:
                self.check(cell, outcome)
            elif not {cell.name} & {*self.running, *self.crashed, *self.elsewhere}:
                left.append(cell)
        return left

    def check(self, cell: Cell, outcome: Outcome) -> None:
        """Refuses an outcome that is of another run of the same name."""
        expected = digest_of(cell, self.corpora[cell.text])
        if outcome.config != expected:
            raise ConfigError(
                got=f"{self.results.path}, whose run {cell.key} was trained as {outcome.config}",
                expected=f"{expected}: the same recipe, measure and text (another Python has another standard library)",
                do="name another file of results and another folder",
            )

    def stop(self) -> None:
        """Asks every process, once, to finish its step and save."""
        if not self.is_stopping:
            self.is_stopping = True
            self.note("stops: every run finishes its step and saves; Ctrl-C again ends at once")
            for run in self.running.values():
                run.process.terminate()

    def start(self, cell: Cell) -> None:
        """Starts the process of a run."""
        write_cell(self.folder, cell, self.corpora[cell.text].folder.absolute(), self.launcher.device)
        path = self.folder / "logs" / f"{cell.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
        again = ["--again"] if cell.key in self.redo else []
        process = subprocess.Popen(
            [*self.launcher.command(), str(self.folder), str(self.results.path), cell.name, *again],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends; the worker then stops
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # read before anything could set it otherwise
            start_new_session=True,  # Ctrl-C reaches this process alone, which tells the others
        )
        step = self.step_of(cell)
        self.running[cell.name] = _Running(cell, process, log, step)
        self.note(f"begins: {cell.key}" + (f", from step {step}" if step else ""))

    def step_of(self, cell: Cell) -> int:
        """Says how far a run is: the step of its newest checkpoint."""
        saved = checkpoints(run_folder(self.folder, cell))
        return step_of(saved[-1]) if saved else 0

    def collect(self) -> bool:
        """Takes in what has ended; tells whether anything has."""
        before = len(self.running)
        for name, run in list(self.running.items()):
            code = run.process.poll()
            if code is None:
                continue
            del self.running[name]
            run.close()
            self.ended(run, code)
        return len(self.running) < before

    def ended(self, run: _Running, code: int) -> None:
        """Notes how a process ended."""
        cell, name = run.cell, run.cell.name
        reached = cell.train.num_steps if code == 0 else self.step_of(cell)
        self.work_done += _work(cell, reached - run.begin_step)
        if code == 0:
            outcome = self.results.read().outcomes[cell.key]
            self.redo.discard(cell.key)
            self.note(f"{_told(outcome)}: {cell.key}")
        elif code == HELD:
            self.elsewhere.add(name)
            self.note(f"another process has it: {cell.key}")
        elif code < 0 or code == 128 + 9:
            self.killed(cell, -code if code < 0 else 9)
        elif code != STOPPED:
            self.crashed[name] = _last_line(self.folder / "logs" / f"{name}.log")
            self.note(f"failed, and is tried again by the next call: {cell.key}: {self.crashed[name]}")

    def killed(self, cell: Cell, number: int) -> None:
        """Lets a run that was killed go on, unless it was killed twice at the same step."""
        if self.is_stopping:
            return
        step, deaths = self.step_of(cell), self.deaths.setdefault(cell.name, [])
        deaths.append(step)
        if len(deaths) < 2 or deaths[-2] != step:
            self.note(f"killed by signal {number} after step {step}, goes on: {cell.key}")
            return
        status = f"killed by signal {number} twice after step {step}, as a system does that is out of memory"
        digest = digest_of(cell, self.corpora[cell.text])
        torn = self.results.append(Outcome(key=cell.key, config=digest, status=status))
        if torn is not None:
            self.note(f"cut off: {torn}")
        self.redo.discard(cell.key)
        self.note(f"{status}: {cell.key}")

    def progress(self, waiting: list[Cell]) -> str:
        """Says what runs, and how much time is left."""
        now = self.work_done
        left = sum(_work(cell, cell.train.num_steps - self.step_of(cell)) for cell in waiting)
        parts = []
        for run in self.running.values():
            steps = run.cell.train.num_steps
            rows = read_rows(run_folder(self.folder, run.cell) / "metrics.jsonl")
            step = rows[-1]["step"] if rows else run.begin_step
            now += _work(run.cell, max(0, step - run.begin_step))
            left += _work(run.cell, steps - max(step, run.begin_step))
            parts.append(f"{run.cell.key} at step {step} of {steps}")
        seconds = (time.monotonic() - self.begin) * left / now if now > 0 else None
        about = "" if seconds is None else f", about {_duration(seconds)} left"
        return f"{len(waiting)} waiting{about}; " + "; ".join(parts)


def run_queue(
    cells_of: Callable[[Table], tuple[Cell, ...]],
    corpora: Mapping[str, Corpus],
    folder: Path,
    results: Results,
    *,
    workers: int = 2,
    launcher: Launcher | None = None,
    note: Callable[[str], None] = lambda _: None,
    again: bool = False,
) -> QueueEnd:
    """Does every run that has no outcome yet, several at a time.

    Each run is a process of its own and adds its outcome to the file itself. SIGINT or SIGTERM lets all of them
    finish their step and save; a second SIGINT, or any kill, ends them at once, and the next call goes on from
    their checkpoints. Several calls may share a folder: a run is done by one process at a time, and once.

    Args:
        cells_of: Returns the runs in the order in which they are to be done; is asked again after each outcome,
            since later runs may depend on earlier ones.
        corpora: The texts by name.
        folder: Receives cells/, locks/, logs/ and runs/.
        results: The file of outcomes.
        workers: Processes at a time, 1 or more.
        launcher: Starts a run's process; ``OneProcess()`` by default.
        note: Is told what happens.
        again: Runs that diverged, ran out of memory or were killed are tried once more.

    Raises:
        ConfigError: An outcome in the file is of another config or text, or workers is out of range.
        DataError: The file is damaged elsewhere than at its end.
    """
    if not is_count(workers):
        raise ConfigError(got=f"workers={workers}", expected="1 or more", do="pass the number of cores")
    table = results.read()
    if table.torn is not None:
        note(f"does not count, and is cut off by the next outcome: {table.torn}")
    redo = {key for key, outcome in table.outcomes.items() if again and not outcome.is_done}
    queue = _Queue(folder, results, corpora, launcher or OneProcess(), note, redo)
    last_line = time.monotonic()
    with StopSignals() as stop:
        waiting = queue.waiting(cells_of)
        try:
            while (waiting and not stop.requested) or queue.running:
                while waiting and len(queue.running) < workers and not stop.requested:
                    queue.start(waiting.pop(0))
                if stop.requested:
                    queue.stop()
                if queue.collect():
                    waiting = queue.waiting(cells_of)
                if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                    last_line = time.monotonic()
                    note(queue.progress(waiting))
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for run in queue.running.values():  # none, unless this call is ended at once
                run.process.kill()
                run.close()
    return QueueEnd(
        is_finished=not (waiting or queue.crashed or queue.elsewhere),
        is_interrupted=stop.requested,
        crashed=queue.crashed,
        elsewhere=tuple(sorted(queue.elsewhere)),
    )


def _work(cell: Cell, steps: int) -> float:
    return training_flops(cell.train, steps)


def _told(outcome: Outcome) -> str:
    if not outcome.is_done:
        return outcome.status
    return f"done, validation loss {outcome.value('validation loss'):.4f} nats a token"


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")[:300]


def _duration(seconds: float) -> str:
    """Says a time in words.

    Example:
        >>> _duration(40.0), _duration(7 * 60.0), _duration(2.5 * 3600)
        ('40 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

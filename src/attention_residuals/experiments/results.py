"""The one CSV file of a study: what every run has found, appended run by run, whole or not at all."""

import csv
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attention_residuals.csv_text import csv_text
from attention_residuals.durable import locked, unwritable
from attention_residuals.errors import DataError

__all__ = ["COLUMNS", "DONE", "Key", "Number", "Outcome", "Results", "Table"]

COLUMNS = ("stage", "arm", "setting", "seed", "config", "quantity", "step", "place", "value")
"""Of the file: one number in each line, of one run."""

DONE = "done"
"""The status of a run that has ended as it should."""

_STATUS = "status"
"""The quantity of a run's last line, without which nothing of the run counts."""


class Key(NamedTuple):
    """Which run of a study.

    Example:
        >>> str(Key("main", "block", "rate 0.004", 3))
        'main, block, rate 0.004, seed 3'
    """

    stage: str
    """Part of the study, such as ``"sweep"`` or ``"main"``."""
    arm: str
    """What is compared, such as a residual rule."""
    setting: str
    """What else differs, such as the learning rate or the size; may be empty."""
    seed: int

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.stage, self.arm, self.setting, f"seed {self.seed}")))


class Number(NamedTuple):
    """One number that was measured."""

    quantity: str
    """What it is, with its unit."""
    value: float
    step: int | None = None
    """Of training, where the number belongs to one."""
    place: int | None = None
    """Of a layer, a number of hops, ...: what the quantity says."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended, and what it found.

    Args:
        key: Which run.
        config: What tells its config and text from any other: hexadecimal digits.
        status: ``"done"``, or in words why there are no numbers: it diverged, or ran out of memory.
        numbers: What was measured; where it is not done, whatever there is.
    """

    key: Key
    config: str
    status: str
    numbers: tuple[Number, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the run ended as it should."""
        return self.status == DONE

    def value(self, quantity: str, *, step: int | None = None, place: int | None = None) -> float:
        """Returns a number; the last one of its quantity where no step is asked for.

        Raises:
            DataError: There is none.
        """
        for number in reversed(self.numbers):
            if number.quantity == quantity and number.place == place and step in (None, number.step):
                return number.value
        raise DataError(
            got=f"no {quantity!r} (step {step}, place {place}) of the run {self.key}",
            expected="a run that has measured it",
            do="see the file of results for what there is",
        )

    def series(self, quantity: str, *, step: int | None = None) -> dict[int, float]:
        """Returns a quantity's numbers by their place at a step, or by their step where they have no place.

        Args:
            quantity: Its name.
            step: Only numbers of that step.
        """
        found = [n for n in self.numbers if n.quantity == quantity and step in (None, n.step)]
        places = [number.step if number.place is None else number.place for number in found]
        return {place: n.value for place, n in zip(places, found, strict=True) if place is not None}


class Table(NamedTuple):
    """What a file of results holds."""

    outcomes: Mapping[Key, Outcome]
    """The last one of each run, in the order of the file."""
    torn: str | None = None
    """What the end of the file holds of a run that was killed while it wrote, None for nothing; it does not count."""

    def done(self, stage: str, arm: str | None = None, setting: str | None = None) -> dict[Key, Outcome]:
        """Returns the runs of a stage that are done."""
        return {
            key: outcome
            for key, outcome in self.outcomes.items()
            if outcome.is_done
            and key.stage == stage
            and arm in (None, key.arm)
            and setting in (None, key.setting)
        }


class Results:
    """The file, which several processes may read and append to at the same time.

    A run's lines go in by one write, behind a lock, and its last line is its status: a run without it does not
    count. What a killed process left half-written is cut off by whoever writes next, and reported.

    Args:
        path: Of the CSV file; is made with the first run.

    Example:
        >>> import tempfile
        >>> results = Results(Path(tempfile.mkdtemp()) / "results.csv")
        >>> key = Key("main", "block", "", 0)
        >>> results.append(Outcome(key=key, config="c0", status=DONE, numbers=(Number("loss", 3.25, step=10),)))
        >>> results.read().outcomes[key].value("loss")
        3.25
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Table:
        """Reads what is there; there is nothing where there is no file yet.

        Raises:
            DataError: A line is not as ``append`` writes it, or the file cannot be read.
        """
        return self._parsed(self._content())[0]

    def append(self, outcome: Outcome) -> str | None:
        """Adds a run, whole, after cutting off what a killed process left half-written.

        Returns:
            What was cut off, or None.

        Raises:
            DataError: The file is damaged elsewhere than at its end.
            CheckpointError: It cannot be written.
        """
        lines = _lines(outcome)
        with locked(self.path.with_name(f".{self.path.name}.lock"), wait=True):
            content = self._content()
            table, whole = self._parsed(content)
            try:
                with self.path.open("ab", buffering=0) as file:
                    if whole < len(content):
                        file.truncate(whole)
                    raw = (lines if whole else csv_text([COLUMNS]) + lines).encode()
                    if file.write(raw) < len(raw):
                        raise OSError("only a part of the lines went through")
                    os.fsync(file.fileno())
            except OSError as error:
                raise unwritable(self.path, error) from error
        return table.torn

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise DataError(
                got=f"{self.path}: {error}", expected="a file that may be read", do="check what lies there"
            ) from error

    def _parsed(self, content: bytes) -> tuple[Table, int]:
        """Returns what is there, and how many bytes of it are whole runs."""
        outcomes: dict[Key, Outcome] = {}
        numbers: list[Number] = []
        began: Key | None = None
        whole = end = 0
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if number == 1:
                self._check_header(line)
                whole = end
                continue
            cells = self._cells(line, number)
            key = Key(cells["stage"], cells["arm"], cells["setting"], int(cells["seed"]))
            if numbers and key != began:  # whose status somebody has lost
                raise self._damaged(number, line)
            began = key
            if cells["quantity"] != _STATUS:
                numbers.append(self._number(cells, number))
                continue
            outcomes.pop(key, None)
            outcomes[key] = Outcome(
                key=key, config=cells["config"], status=cells["value"], numbers=tuple(numbers)
            )
            numbers, whole = [], end
        rest = content[whole:]
        torn = None
        if rest:
            lines = rest.splitlines()
            torn = f"{len(lines)} line(s) without a status at the end of {self.path}, the last {lines[-1][:60]!r}"
        return Table(outcomes, torn), whole

    def _check_header(self, line: bytes) -> None:
        if line != csv_text([COLUMNS]).encode():
            raise self._damaged(1, line)

    def _cells(self, line: bytes, number: int) -> dict[str, str]:
        try:
            (cells,) = csv.reader([line.decode().rstrip("\n")], strict=True)
            found = dict(zip(COLUMNS, cells, strict=True))
            int(found["seed"])
        except (ValueError, csv.Error) as error:
            raise self._damaged(number, line) from error
        return found

    def _number(self, cells: Mapping[str, str], number: int) -> Number:
        try:
            step, place = (int(cells[name]) if cells[name] else None for name in ("step", "place"))
            return Number(cells["quantity"], float(cells["value"]), step, place)
        except ValueError as error:
            raise self._damaged(number, ",".join(cells.values()).encode()) from error

    def _damaged(self, number: int, line: bytes) -> DataError:
        return DataError(
            got=f"{self.path}, line {number}: {line[:60]!r}",
            expected=f"the columns {','.join(COLUMNS)}, as a study writes them",
            do="restore the file from version control or from a copy, or name another file",
        )


def _lines(outcome: Outcome) -> str:
    status = " ".join(outcome.status.split())
    rows: list[Iterable[object]] = []
    for number in outcome.numbers:
        if number.quantity == _STATUS or not math.isfinite(number.value):
            raise DataError(
                got=f"{number} of {outcome.key}",
                expected="a finite number under a name of its own",
                do="leave it out, and say so in the status",
            )
        places = ("" if place is None else place for place in (number.step, number.place))
        rows.append((*outcome.key, outcome.config, number.quantity, *places, repr(float(number.value))))
    rows.append((*outcome.key, outcome.config, _STATUS, "", "", status))
    return csv_text(rows)

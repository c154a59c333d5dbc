"""What a person sees of a run: a live line on a terminal, else a plain line now and then, on stderr."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Reporter"]

SECONDS_BETWEEN_LINES = 30.0


class Reporter:
    """Shows how far a run is.

    Args:
        num_steps: Of the whole run.
        shown: False shows nothing.
    """

    def __init__(self, *, num_steps: int, shown: bool) -> None:
        self.num_steps, self.shown = num_steps, shown
        self.console = Console(stderr=True, quiet=not shown, highlight=False)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not shown or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_steps)
        self._last_line = time.monotonic()

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, step: int) -> None:
        """Tells where the run goes on; time left is measured from here."""
        self._progress.reset(self._task, total=self.num_steps, completed=step)
        if step:
            self.note(f"going on from step {step}")

    def step(self, step: int, *, loss: float, bits_per_byte: float | None, tokens_per_second: float) -> None:
        """Shows a finished step."""
        bits = "" if bits_per_byte is None else f"{bits_per_byte:.3f} bits/byte, "
        text = f"loss {loss:.3f}, {bits}{tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, description=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.note(f"step {step}/{self.num_steps}: {text}")

    def note(self, text: str) -> None:
        """Says something once."""
        self.console.print(text, markup=False, soft_wrap=True)

"""Stopping between two steps when SIGINT or SIGTERM asks for it."""

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]


class StopSignals:
    """While open, the first SIGINT or SIGTERM only sets ``requested``; the next SIGINT interrupts at once.

    Outside of the main thread, where Python allows no handlers, it does nothing.

    Example:
        >>> with StopSignals() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(stop.requested)
        True
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

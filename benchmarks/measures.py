"""What every case is made of: a line of the result, and the peak of live memory."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch.profiler import profile

__all__ = ["Line", "peak"]


class Line(NamedTuple):
    """One row of the result."""

    case: str
    arm: str
    value: str
    wanted: str = ""
    holds: bool | None = None


def peak(step: Callable[[], object]) -> int:
    """Returns the most bytes of live tensors during a call above those at its start, from the profiler's events."""
    with profile(profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak

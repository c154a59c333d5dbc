"""The command line that commands join."""

from typing import Literal

import tyro

__all__ = ["INTERRUPTED", "Device", "app"]


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped, as shells have it."""

Device = Literal["auto", "cpu", "cuda"]

app = tyro.extras.SubcommandApp()

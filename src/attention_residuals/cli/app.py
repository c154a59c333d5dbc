"""The command line that commands join."""

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Literal, ParamSpec

import tyro

from attention_residuals.errors import ConfigError

__all__ = ["INTERRUPTED", "Device", "command", "parsed"]


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped, as shells have it."""

Device = Literal["auto", "cpu", "cuda"]

P = ParamSpec("P")

_app = tyro.extras.SubcommandApp()


def command(name: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Joins a function to the command line; ``parsed`` gives it with its options, to be called."""

    def join(function: Callable[P, int]) -> Callable[P, int]:
        @wraps(function)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> partial[int]:
            return partial(function, *args, **kwargs)

        _app.command(name=name)(chosen)
        return function

    return join


def parsed(arguments: Sequence[str], *, prog: str, about: str) -> Callable[[], int]:
    """Reads the command line and returns what it asks for, to be called.

    Raises:
        ConfigError: An option's value is refused by the config that it belongs to.
        SystemExit: Help was asked for, or an option is unknown or cannot be read.
    """
    told = io.StringIO()  # tyro draws every refusal in a box, under names of its own
    try:
        with redirect_stderr(told):
            call: Callable[[], int] = _app.cli(prog=prog, description=about, args=arguments)
    except SystemExit as ended:
        cause = ended.__context__
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        sys.stderr.write(told.getvalue())
        raise
    sys.stderr.write(told.getvalue())
    return call

"""The command ``attnres``."""

import os
import sys
import warnings
from collections.abc import Sequence

from attention_residuals.cli import (
    comparing,
    conversion,
    exporting,
    generation,
    intervening,
    planning,
    study,
    training,
    view,
    viewing,
)
from attention_residuals.cli.app import INTERRUPTED, parsed
from attention_residuals.errors import AttentionResidualsError, ConfigError
from attention_residuals.version import __version__

__all__ = ["main"]

ABOUT = "Train, evaluate and read transformers with attention residuals."

COMMANDS = (
    training,
    generation,
    viewing,
    comparing,
    intervening,
    view,
    conversion,
    exporting,
    planning,
    study,
)
"""The modules whose commands have joined the command line; ``--help`` lists them in this order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (it failed), 2 (it was called wrongly) or 130 (it was interrupted)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"attnres {__version__}")
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"attnres: {message}", file=sys.stderr)
        try:
            return parsed(arguments, prog="attnres", about=ABOUT)()
        except AttentionResidualsError as error:
            print(f"attnres: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except BrokenPipeError:  # whoever reads, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            print("attnres: interrupted; the same command starts again or resumes", file=sys.stderr)
            return INTERRUPTED

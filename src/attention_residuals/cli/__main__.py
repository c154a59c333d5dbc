"""Runs the command: ``python -m attention_residuals.cli``."""

import sys

from attention_residuals.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())

"""The command line: train, evaluate and read transformers with attention residuals."""

from attention_residuals.cli.main import main

__all__ = ["main"]

"""Attention residuals: softmax attention over depth in transformers, trained, run and read."""

__version__ = "0.1.0"

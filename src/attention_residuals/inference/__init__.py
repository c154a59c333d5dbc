"""Running a trained model."""

from attention_residuals.inference.cache import KVCache

__all__ = ["KVCache"]

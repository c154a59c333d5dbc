"""Inference: key-value cache, prefill in one process or several, sampling, and the engine."""

from attention_residuals.inference.cache import KVCache
from attention_residuals.inference.engine import Completion, Engine, Piece
from attention_residuals.inference.prefill import Prefilled, left_padded, positions_of, prefill
from attention_residuals.inference.sampling import Sampling
from attention_residuals.inference.sharding import ShardedCache, shard_of, sharded_prefill
from attention_residuals.inference.text import TextStream

__all__ = [
    "Completion",
    "Engine",
    "KVCache",
    "Piece",
    "Prefilled",
    "Sampling",
    "ShardedCache",
    "TextStream",
    "left_padded",
    "positions_of",
    "prefill",
    "shard_of",
    "sharded_prefill",
]

"""Inference: the key-value cache and prefill, in one process or several."""

from attention_residuals.inference.cache import KVCache
from attention_residuals.inference.prefill import Prefilled, left_padded, prefill
from attention_residuals.inference.sharding import ShardedCache, shard_of, sharded_prefill

__all__ = ["KVCache", "Prefilled", "ShardedCache", "left_padded", "prefill", "shard_of", "sharded_prefill"]

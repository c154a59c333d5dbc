"""Modules that a transformer with depth attention is made of, one idea a file."""

from attention_residuals.layers.attention import Attention, AttentionContext, Cache
from attention_residuals.layers.mlp import MLP
from attention_residuals.layers.norm import RMSNorm
from attention_residuals.layers.tap import (
    EMBEDDING,
    OUTPUT,
    Chain,
    ExpertChoice,
    ExpertTap,
    Pass,
    Read,
    Site,
    Tap,
    Write,
)

__all__ = [
    "EMBEDDING",
    "MLP",
    "OUTPUT",
    "Attention",
    "AttentionContext",
    "Cache",
    "Chain",
    "ExpertChoice",
    "ExpertTap",
    "Pass",
    "RMSNorm",
    "Read",
    "Site",
    "Tap",
    "Write",
]

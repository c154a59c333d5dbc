"""Attention residuals: softmax attention over depth in transformers, trained, run and read."""

from attention_residuals.errors import AttentionResidualsError
from attention_residuals.layers import EMBEDDING, OUTPUT, Chain, Pass, Read, RMSNorm, Site, Tap, Write
from attention_residuals.layers.residual import AttnRes, ResidualConfig, ResidualRule, StandardResidual
from attention_residuals.models import Decoder, DecoderConfig, load_model, presets, save_model
from attention_residuals.ops import DepthRead, depth_attention
from attention_residuals.trace import Recorder, Trace, record, routing_table
from attention_residuals.version import __version__

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "AttentionResidualsError",
    "AttnRes",
    "Chain",
    "Decoder",
    "DecoderConfig",
    "DepthRead",
    "Pass",
    "RMSNorm",
    "Read",
    "Recorder",
    "ResidualConfig",
    "ResidualRule",
    "Site",
    "StandardResidual",
    "Tap",
    "Trace",
    "Write",
    "__version__",
    "depth_attention",
    "load_model",
    "presets",
    "record",
    "routing_table",
    "save_model",
]

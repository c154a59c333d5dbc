"""Depth attention as pure functions on tensors."""

from attention_residuals.ops.backends import BACKENDS, Backend, chosen_backend, depth_attention
from attention_residuals.ops.depth_read import DepthRead
from attention_residuals.ops.fused import share_gradients
from attention_residuals.ops.mix import DepthLogits, depth_logits, weighted_mix
from attention_residuals.ops.reference import weighted_sum

__all__ = [
    "BACKENDS",
    "Backend",
    "DepthLogits",
    "DepthRead",
    "chosen_backend",
    "depth_attention",
    "depth_logits",
    "share_gradients",
    "weighted_mix",
    "weighted_sum",
]

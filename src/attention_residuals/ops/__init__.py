"""Depth attention as pure functions on tensors."""

from attention_residuals.ops.backends import BACKENDS, depth_attention
from attention_residuals.ops.depth_read import DepthRead
from attention_residuals.ops.reference import weighted_sum

__all__ = ["BACKENDS", "DepthRead", "depth_attention", "weighted_sum"]

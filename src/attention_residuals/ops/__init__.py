"""Depth attention as pure functions on tensors."""

from attention_residuals.ops.backends import BACKENDS, Backend, chosen_backend, depth_attention, depth_mix
from attention_residuals.ops.depth_read import DepthRead
from attention_residuals.ops.fused import share_gradients
from attention_residuals.ops.mix import DepthLogits, depth_logits, weighted_mix
from attention_residuals.ops.phases import Phase1, Phase2
from attention_residuals.ops.reference import weighted_sum
from attention_residuals.ops.two_phase import merge, phase_1, phase_2, read_open_block

__all__ = [
    "BACKENDS",
    "Backend",
    "DepthLogits",
    "DepthRead",
    "Phase1",
    "Phase2",
    "chosen_backend",
    "depth_attention",
    "depth_logits",
    "depth_mix",
    "merge",
    "phase_1",
    "phase_2",
    "read_open_block",
    "share_gradients",
    "weighted_mix",
    "weighted_sum",
]

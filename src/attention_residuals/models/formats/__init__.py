"""Checkpoints of other people's attention-residual models, read and written."""

from attention_residuals.models.formats.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from attention_residuals.models.formats.fla import load_fla, save_fla

__all__ = ["Checkpoint", "load_fla", "read_checkpoint", "save_fla", "write_checkpoint"]

"""Training: one loop that can be killed at any moment and goes on to the same bits."""

from attention_residuals.train.checkpoint import load_checkpoint_model, newest_checkpoint
from attention_residuals.train.config import TRAIN_CONFIGS, Saving, TrainConfig
from attention_residuals.train.evaluation import Evaluation, evaluate
from attention_residuals.train.loop import Monitor, Result, train
from attention_residuals.train.optimizer import AdamW, Muon
from attention_residuals.train.run_folder import Run, load_run
from attention_residuals.train.schedule import WSD, Cosine, Segment, Segments

__all__ = [
    "TRAIN_CONFIGS",
    "WSD",
    "AdamW",
    "Cosine",
    "Evaluation",
    "Monitor",
    "Muon",
    "Result",
    "Run",
    "Saving",
    "Segment",
    "Segments",
    "TrainConfig",
    "evaluate",
    "load_checkpoint_model",
    "load_run",
    "newest_checkpoint",
    "train",
]

"""The main job: a standard and an attention-residual model trained side by side, and a report on both."""

from attention_residuals.demo.demo import Demo, run_demo

__all__ = ["Demo", "run_demo"]

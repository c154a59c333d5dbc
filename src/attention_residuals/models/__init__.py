"""Decoder language models with a residual rule of your choice."""

from attention_residuals.models import presets
from attention_residuals.models.config import MODEL_CONFIGS, DecoderConfig
from attention_residuals.models.decoder import Decoder, Layer
from attention_residuals.models.weights import load_model, save_model

__all__ = ["MODEL_CONFIGS", "Decoder", "DecoderConfig", "Layer", "load_model", "presets", "save_model"]

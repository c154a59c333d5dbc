"""Decoder language models with a residual rule of your choice."""

from attention_residuals.models import presets
from attention_residuals.models.building import MODEL_CONFIGS, build
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.decoder import Decoder, Layer
from attention_residuals.models.language_model import LanguageModel, ModelConfig, RouterShape
from attention_residuals.models.weights import load_model, save_model

__all__ = [
    "MODEL_CONFIGS",
    "ConvertedConfig",
    "Decoder",
    "DecoderConfig",
    "LanguageModel",
    "Layer",
    "ModelConfig",
    "RouterShape",
    "build",
    "load_model",
    "presets",
    "save_model",
]

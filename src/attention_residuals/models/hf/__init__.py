"""Transformers: our decoder as one of its models, and its models around our residual rules."""

from attention_residuals.models.hf.auto import ConvertedForCausalLM
from attention_residuals.models.hf.causal_lm import AttnResForCausalLM
from attention_residuals.models.hf.configuration import AttnResConfig
from attention_residuals.models.hf.conversion import convert
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.hf.saving import save_converted

__all__ = [
    "AttnResConfig",
    "AttnResForCausalLM",
    "ConvertedForCausalLM",
    "ConvertedModel",
    "convert",
    "save_converted",
]

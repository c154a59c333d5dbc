"""Figures of runs and traces. Nothing else in the package imports matplotlib."""

from attention_residuals.plots.contrast import contrast_map
from attention_residuals.plots.effects import effect_map
from attention_residuals.plots.files import png_bytes, save
from attention_residuals.plots.lines import layer_profile, loss_curves
from attention_residuals.plots.maps import routing_map, token_map
from attention_residuals.plots.mixing import mixing_map

__all__ = [
    "contrast_map",
    "effect_map",
    "layer_profile",
    "loss_curves",
    "mixing_map",
    "png_bytes",
    "routing_map",
    "save",
    "token_map",
]

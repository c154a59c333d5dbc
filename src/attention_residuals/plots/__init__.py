"""Figures of runs and traces. Nothing else in the package imports matplotlib."""

from attention_residuals.plots.contrast import contrast_map
from attention_residuals.plots.effects import effect_map
from attention_residuals.plots.files import png_bytes, save, svg_bytes
from attention_residuals.plots.intervals import interval_plot
from attention_residuals.plots.lines import curve_plot, layer_profile, loss_curves
from attention_residuals.plots.maps import routing_map, token_map
from attention_residuals.plots.marked import marked_map
from attention_residuals.plots.mixing import mixing_map

__all__ = [
    "contrast_map",
    "curve_plot",
    "effect_map",
    "interval_plot",
    "layer_profile",
    "loss_curves",
    "marked_map",
    "mixing_map",
    "png_bytes",
    "routing_map",
    "save",
    "svg_bytes",
    "token_map",
]

"""Residual rules: small classes behind one interface, ``open / read / write``."""

from attention_residuals.layers.residual.attnres import AttnRes, AttnResRule
from attention_residuals.layers.residual.cumulative import Cumulative
from attention_residuals.layers.residual.delta import Delta
from attention_residuals.layers.residual.denseformer import DenseFormer
from attention_residuals.layers.residual.heads import MultiHead
from attention_residuals.layers.residual.highway import Highway
from attention_residuals.layers.residual.hyper import HyperConnections, ManifoldHyperConnections
from attention_residuals.layers.residual.inkling2 import Inkling2
from attention_residuals.layers.residual.input_query import InputQuery
from attention_residuals.layers.residual.interface import (
    Norm,
    ResidualConfig,
    ResidualRule,
    Semantics,
    checked_inputs,
    rehearse,
)
from attention_residuals.layers.residual.raw_keys import RawKeys
from attention_residuals.layers.residual.sigmoid import Sigmoid
from attention_residuals.layers.residual.sources import DepthReader, SourceConfig, SourceRule, SourceState
from attention_residuals.layers.residual.standard import StandardResidual, StandardRule, StandardState
from attention_residuals.layers.residual.static import StaticMixing
from attention_residuals.layers.residual.two_phase import TwoPhaseRule
from attention_residuals.layers.residual.value_query import ValueQuery
from attention_residuals.layers.residual.window import SlidingWindow

__all__ = [
    "RULES",
    "AttnRes",
    "AttnResRule",
    "Cumulative",
    "Delta",
    "DenseFormer",
    "DepthReader",
    "Highway",
    "HyperConnections",
    "Inkling2",
    "InputQuery",
    "ManifoldHyperConnections",
    "MultiHead",
    "Norm",
    "RawKeys",
    "ResidualConfig",
    "ResidualRule",
    "Semantics",
    "Sigmoid",
    "SlidingWindow",
    "SourceConfig",
    "SourceRule",
    "SourceState",
    "StandardResidual",
    "StandardRule",
    "StandardState",
    "StaticMixing",
    "TwoPhaseRule",
    "ValueQuery",
    "checked_inputs",
    "rehearse",
]

RULES: dict[str, type[ResidualConfig]] = {
    "standard": StandardResidual,
    "attnres": AttnRes,
    "denseformer": DenseFormer,
    "hc": HyperConnections,
    "mhc": ManifoldHyperConnections,
    "highway": Highway,
    "input-query": InputQuery,
    "static": StaticMixing,
    "sigmoid": Sigmoid,
    "raw-keys": RawKeys,
    "window": SlidingWindow,
    "heads": MultiHead,
    "value-query": ValueQuery,
    "delta": Delta,
    "inkling2": Inkling2,
    "cumulative": Cumulative,
}
"""Every rule's config by the name that files and commands use."""

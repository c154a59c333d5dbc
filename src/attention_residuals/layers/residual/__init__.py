"""Residual rules: small classes behind one interface, ``open / read / write``."""

from attention_residuals.layers.residual.attnres import AttnRes, AttnResRule, AttnResState, DepthReader
from attention_residuals.layers.residual.interface import Norm, ResidualConfig, ResidualRule
from attention_residuals.layers.residual.standard import StandardResidual, StandardRule, StandardState

__all__ = [
    "RULES",
    "AttnRes",
    "AttnResRule",
    "AttnResState",
    "DepthReader",
    "Norm",
    "ResidualConfig",
    "ResidualRule",
    "StandardResidual",
    "StandardRule",
    "StandardState",
]

RULES: dict[str, type[ResidualConfig]] = {
    "attnres": AttnRes,
    "standard": StandardResidual,
}
"""Every rule's config by the name that files and commands use."""

"""The config of a Transformers model that runs around a residual rule of this library."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from attention_residuals.errors import ConfigError, is_count, is_finite
from attention_residuals.layers.residual import ResidualConfig, ResidualRule, rehearse

__all__ = ["ConvertedConfig", "read_scales"]


@dataclass(frozen=True, kw_only=True)
class ConvertedConfig:
    """Everything that decides what a converted model computes; ``convert`` makes it.

    Args:
        transformers: The model's own config, as the JSON text that Transformers writes.
        vocab_size: V.
        width: D.
        max_tokens: The longest sequence that the model accepts.
        residual: The residual rule with its options.
        decoder: The module that owns the layers, by name; empty for the model itself.
        first_layer: The module in which the stream starts.
        norms: The norm that each site reads with, by name: two a layer, and the last.
        eps: Of each of these norms.

    Raises:
        ConfigError: A value out of range, or values that contradict each other.
    """

    transformers: str
    vocab_size: int
    width: int
    max_tokens: int
    residual: ResidualConfig
    decoder: str
    first_layer: str
    norms: tuple[str, ...]
    eps: tuple[float, ...]

    def __post_init__(self) -> None:
        checks = {
            "vocab_size": is_count(self.vocab_size),
            "width": is_count(self.width),
            "max_tokens": is_count(self.max_tokens),
            "residual": isinstance(self.residual, ResidualConfig),
            "norms": len(self.norms) % 2 == 1,
            "eps": len(self.eps) == len(self.norms) and all(is_finite(eps) and eps >= 0 for eps in self.eps),
            "transformers": _is_object(self.transformers),
        }
        wrong = next((name for name, is_right in checks.items() if not is_right), None)
        if wrong is not None:
            raise ConfigError(
                got=f"{wrong}={getattr(self, wrong)!r}",
                expected="what convert wrote: counts, an odd number of norms, an eps >= 0 for each, JSON",
                do="convert the model again",
            )

    @property
    def num_layers(self) -> int:
        """L of the model."""
        return len(self.norms) // 2

    @property
    def original(self) -> dict[str, Any]:
        """The model's own config."""
        return dict(json.loads(self.transformers))


def read_scales(rule: ResidualRule[Any]) -> list[float]:
    """Tells what share of the sum of all outputs each read of a fresh rule is, site by site.

    Example:
        >>> from attention_residuals.layers.residual import AttnRes
        >>> read_scales(AttnRes(sublayers_per_block=2).build(num_layers=2, width=4))
        [1.0, 0.5, 0.5, 0.3333333333333333, 0.3333333333333333]
    """
    reads, _ = rehearse(rule.double(), torch.ones(1, 1, rule.width, dtype=torch.float64))
    return [read.mean().item() / num_written for num_written, read in enumerate(reads, start=1)]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, TypeError):
        return False

"""Checkpoints of other people's attention-residual models, read and written."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attention_residuals.models.formats.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from attention_residuals.models.formats.fla import load_fla, save_fla

if TYPE_CHECKING:
    from attention_residuals.models.formats.inkling2 import load_inkling2, save_inkling2
    from attention_residuals.models.formats.kimi_k3 import load_kimi_k3, save_kimi_k3
    from attention_residuals.models.formats.open_attnres import load_open_attnres, save_open_attnres

__all__ = [
    "Checkpoint",
    "load_fla",
    "load_inkling2",
    "load_kimi_k3",
    "load_open_attnres",
    "read_checkpoint",
    "save_fla",
    "save_inkling2",
    "save_kimi_k3",
    "save_open_attnres",
    "write_checkpoint",
]

_AROUND_TRANSFORMERS = ("inkling2", "kimi_k3", "open_attnres")


def __getattr__(name: str) -> Any:
    """Imports a format whose sublayers are Transformers' when it is asked for: Transformers is an extra."""
    module = name.removeprefix("load_").removeprefix("save_")
    if name in __all__ and module in _AROUND_TRANSFORMERS:
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""RMSNorm, and which norms a depth read can fold into itself."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from attention_residuals.ops.depth_read import compute_dtype

__all__ = ["Foldable", "RMSNorm", "foldable"]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain, computed in float32 and cast back once.

    Args:
        width: Size of the last axis.
        eps: Added to the mean square, >= 0.

    Source:
        Zhang and Sennrich, arXiv:1910.07467.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).tolist()
        [[1.0, 1.0]]
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*BT D"]) -> Float[Tensor, "*BT D"]:
        """Normalises the last axis."""
        dtype = compute_dtype(hidden.dtype)
        normalised = F.rms_norm(hidden.to(dtype), self.gain.shape, self.gain.to(dtype), self.eps)
        return normalised.to(hidden.dtype)

    def extra_repr(self) -> str:
        """Shows width and eps when printed."""
        return f"{len(self.gain)}, eps={self.eps}"


@runtime_checkable
class Foldable(Protocol):
    """A norm of somebody else that knows whether it computes what ``RMSNorm`` does."""

    def folded(self) -> tuple[Tensor, float] | None:
        """Returns its gain and eps, or None where it must run itself."""
        ...


def foldable(norm: object) -> tuple[Tensor, float] | None:
    """Returns gain and eps of a norm that a depth read can compute itself, else None.

    A norm with hooks is left to itself, so that the hooks fire.

    Example:
        >>> foldable(RMSNorm(4, eps=1e-5))[1], foldable(nn.LayerNorm(4))
        (1e-05, None)
    """
    if type(norm) is RMSNorm:
        return None if _is_watched(norm) else (norm.gain, norm.eps)
    if not isinstance(norm, nn.Module):
        return norm.folded() if isinstance(norm, Foldable) else None
    # Without an eps of its own, PyTorch's norm takes that of the dtype it computes in.
    if type(norm) is not nn.RMSNorm or norm.eps is None or norm.weight is None or norm.weight.ndim != 1:
        return None
    return None if _is_watched(norm) else (norm.weight, norm.eps)


def _is_watched(norm: nn.Module) -> bool:
    """Tells whether somebody has hooked into the norm, or put another forward pass into it."""
    own = norm.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or _has_any_global_hook()
    )

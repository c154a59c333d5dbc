"""Tensors as the text that a page carries: float32 or int32, their bytes by place, deflated, in base64."""

import base64
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_residuals.errors import NonFiniteError

__all__ = ["encoded", "require_finite"]


def encoded(tensor: Tensor) -> dict[str, Any]:
    """Encodes a tensor for the page: ``{"type", "shape", "data"}``.

    The little-endian bytes are put in order of their place in a number (all first bytes, then all second
    ones), which deflates better, and deflated. NaN stands for a number that is not defined.

    Args:
        tensor: Floats become float32, whole numbers int32.

    Example:
        >>> encoded(torch.tensor([1.0, 0.5]))["shape"]
        [2]
    """
    kind = "float32" if tensor.dtype.is_floating_point else "int32"
    numbers = tensor.detach().cpu().to(getattr(torch, kind)).contiguous().numpy().astype(f"<{kind[0]}4")
    places = np.frombuffer(numbers.tobytes(), np.uint8).reshape(-1, 4).T
    data = base64.b64encode(zlib.compress(places.tobytes(), 6)).decode("ascii")
    return {"type": kind, "shape": list(tensor.shape), "data": data}


def require_finite(numbers: Tensor, real: Tensor, what: str) -> Tensor:
    """Returns numbers with NaN at padding, and refuses them where they are not finite at a token.

    Args:
        numbers: [..., B, T].
        real: [B, T], False at padding.
        what: Names the numbers in the error.

    Raises:
        NonFiniteError: It names the first token.
    """
    wrong = ~numbers.isfinite() & real
    if wrong.any():
        *_, row, token = wrong.nonzero()[0].tolist()
        raise NonFiniteError(
            got=f"{what} {numbers[wrong][0].item()} at token {token} of text {row}",
            expected="finite numbers at every token that is not padding",
            do="look at the model that was traced: its activations are not finite there",
        )
    return numbers.masked_fill(~real, torch.nan)

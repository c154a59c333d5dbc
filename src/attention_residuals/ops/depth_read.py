"""What one depth read returns, and the checks that every backend shares."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import NonFiniteError, ShapeError

__all__ = ["DepthRead", "checked_sources", "compute_dtype", "require_finite"]


class DepthRead(NamedTuple):
    """The result of one depth read.

    ``mix`` has the sources' dtype; logits and inverse norms are float32 (float64 for float64 sources).
    ``mix`` is the weighted sum of the raw sources or, where an output gain was given, that sum after
    its RMSNorm.
    """

    mix: Float[Tensor, "*BT D"]
    logits: Float[Tensor, "S *BT"]
    inverse_norms: Float[Tensor, "S *BT"]

    @property
    def weights(self) -> Float[Tensor, "S *BT"]:
        """Softmax of the logits over the sources; differentiable; sums to 1 over ``S``."""
        return self.logits.softmax(0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a read of such sources is computed: float32, or float64 for float64.

    Example:
        >>> compute_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def checked_sources(
    sources: Sequence[Tensor] | Tensor,
    pseudo_query: Tensor,
    key_gain: Tensor,
    output_gain: Tensor | None,
    output_eps: float | None,
) -> tuple[Tensor, ...]:
    """Returns the sources as a tuple, or raises.

    Raises:
        ShapeError: No sources; sources that differ in shape, dtype or device or are not floating point;
            a vector that is not of the sources' width; only one of output gain and output eps.
    """
    unstacked = sources.unbind(0) if isinstance(sources, Tensor) else tuple(sources)
    if not unstacked:
        raise ShapeError(
            got="zero sources",
            expected="at least one source, the embedding",
            do="open the residual state with the embedding before the first read",
        )
    first = unstacked[0]
    if first.ndim == 0 or not first.is_floating_point():
        raise ShapeError(
            got=f"source 0 of shape {tuple(first.shape)} and dtype {first.dtype}",
            expected="floating-point sources whose last axis is the width",
            do="pass sources of shape [..., D] in float32, bfloat16, float16 or float64",
        )
    for number, source in enumerate(unstacked):
        if source.shape != first.shape or source.dtype != first.dtype or source.device != first.device:
            raise ShapeError(
                got=f"source {number} is {source.dtype}{list(source.shape)} on {source.device}",
                expected=f"{first.dtype}{list(first.shape)} on {first.device}, as source 0",
                do="write every source with the shape, dtype and device of the embedding",
            )
    width = first.shape[-1]
    vectors = {"pseudo_query": pseudo_query, "key_gain": key_gain, "output_gain": output_gain}
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (width,):
            raise ShapeError(
                got=f"{name} of shape {tuple(vector.shape)}",
                expected=f"({width},), the width of the sources",
                do=f"pass one vector of {width} numbers",
            )
    if (output_gain is None) != (output_eps is None):
        raise ShapeError(
            got=f"output_gain {'absent' if output_gain is None else 'given'}, output_eps={output_eps}",
            expected="both or neither",
            do="pass output_gain and output_eps together to fold the reader's RMSNorm into the read",
        )
    return unstacked


def require_finite(read: DepthRead) -> DepthRead:
    """Raises if a source held NaN or infinity: either makes a logit NaN, whatever the query.

    Only on the CPU and outside of compiled graphs, where looking at a number is cheap.

    Raises:
        NonFiniteError: Some logit is not finite.
    """
    if read.logits.device.type != "cpu" or torch.compiler.is_compiling():
        return read
    logits = read.logits.detach()
    if not math.isfinite(logits.sum().item()):
        bad = [number for number, logit in enumerate(logits) if not logit.isfinite().all()]
        raise NonFiniteError(
            got=f"NaN or infinity in the logits of sources number {bad} of {len(logits)}",
            expected="finite sources, pseudo-query and key gain",
            do="find the sublayer that wrote that source; a lower learning rate or clipping may help",
        )
    return read

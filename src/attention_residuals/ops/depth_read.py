"""What one depth read returns, and the checks that every backend shares."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import BackendError, NonFiniteError, ShapeError

__all__ = [
    "DepthRead",
    "checked_sources",
    "compute_dtype",
    "refuse_transforms",
    "require_finite",
    "second_derivative",
]


class DepthRead(NamedTuple):
    """The result of one depth read.

    ``mix`` has the sources' dtype; logits and inverse norms are float32 (float64 for float64 sources).
    ``mix`` is the weighted sum of the raw sources or, where an output gain was given, that sum after
    its RMSNorm. Where groups of channels are scored apart, a last axis H numbers the groups.
    """

    mix: Float[Tensor, "*BT D"]
    logits: Float[Tensor, "S *BT"] | Float[Tensor, "S *BT H"]
    inverse_norms: Float[Tensor, "S *BT"] | Float[Tensor, "S *BT H"]

    @property
    def weights(self) -> Float[Tensor, "S *BT"] | Float[Tensor, "S *BT H"]:
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
    pseudo_query: Tensor | None,
    key_gain: Tensor | None,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    eps: float | None,
    output_eps: float | None,
) -> tuple[Tensor, ...]:
    """Returns the sources as a tuple, or raises.

    Raises:
        ShapeError: No sources; sources that differ in shape, dtype or device or are not floating point;
            a vector that is not of the sources' width; a bias that is not one number for each source and
            token; only one of output gain and output eps.
    """
    unstacked = sources.unbind(0) if isinstance(sources, Tensor) else tuple(sources)
    if not unstacked:
        raise ShapeError(
            got="zero sources",
            expected="at least one source, the embedding",
            do="open the residual state with the embedding before the first read",
        )
    first = unstacked[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    if not shape or not dtype.is_floating_point:
        raise ShapeError(
            got=f"source 0 of shape {tuple(shape)} and dtype {dtype}",
            expected="floating-point sources whose last axis is the width",
            do="pass sources of shape [..., D] in float32, bfloat16, float16 or float64",
        )
    for number, source in enumerate(unstacked):
        if source.shape != shape or source.dtype is not dtype or source.device != device:
            raise ShapeError(
                got=f"source {number} is {source.dtype}{list(source.shape)} on {source.device}",
                expected=f"{dtype}{list(shape)} on {device}, as source 0",
                do="write every source with the shape, dtype and device of the embedding",
            )
    width = shape[-1]
    vectors = {"pseudo_query": pseudo_query, "key_gain": key_gain, "output_gain": output_gain}
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (width,):
            raise ShapeError(
                got=f"{name} of shape {tuple(vector.shape)}",
                expected=f"({width},), the width of the sources",
                do=f"pass one vector of {width} numbers",
            )
    if logit_bias is not None and logit_bias.shape != (per_token := (len(unstacked), *shape[:-1])):
        raise ShapeError(
            got=f"logit_bias of shape {tuple(logit_bias.shape)}",
            expected=f"{per_token}, a number for each source and token",
            do="expand it: logit_bias.expand(...)",
        )
    if not (eps or 0.0) >= 0 or not (output_eps or 0.0) >= 0:
        raise ShapeError(
            got=f"eps={eps}, output_eps={output_eps}", expected="numbers >= 0", do="1e-6 is usual"
        )
    if (output_gain is None) != (output_eps is None):
        raise ShapeError(
            got=f"output_gain {'absent' if output_gain is None else 'given'}, output_eps={output_eps}",
            expected="both or neither",
            do="pass output_gain and output_eps together to fold the reader's RMSNorm into the read",
        )
    return unstacked


def require_finite(read: DepthRead, logit_bias: Tensor | None = None) -> DepthRead:
    """Raises if a source held NaN or infinity, or if a bias took all sources away.

    Either makes a token's largest logit not finite, whatever the query. Only on the CPU and outside of
    compiled graphs, where looking at a number is cheap.

    Raises:
        NonFiniteError: The largest logit of some token is not finite.
    """
    if read.logits.device.type != "cpu" or torch.compiler.is_compiling() or not read.mix.numel():
        return read
    if torch._C._functorch.peek_interpreter_stack() is not None:  # under vmap no number can be looked at
        return read
    logits = read.logits.detach()
    # A sum is the cheapest look at all of them; with a bias, -inf may be meant.
    if math.isfinite((logits if logit_bias is None else logits.amax(0)).sum().item()):
        return read
    if logit_bias is not None and (taken := (logit_bias == -math.inf).all(0)).any():
        raise NonFiniteError(
            got=f"a logit_bias of -inf for every source of {int(taken.sum())} token(s)",
            expected="at least one source left for each token",
            do="leave one source, such as the newest, without -inf",
        )
    bad = [number for number, logit in enumerate(logits) if (logit.isnan() | (logit == math.inf)).any()]
    raise NonFiniteError(
        got=f"NaN or infinity in the logits of sources number {bad} of {len(logits)}",
        expected="finite sources, pseudo-query and key gain",
        do="find the sublayer that wrote that source; a lower learning rate or clipping may help",
    )


def refuse_transforms(name: str) -> None:
    """Refuses a call under a functional transform, which only the reference can follow.

    Raises:
        BackendError: The call is under ``torch.vmap`` or another transform.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise BackendError(
            got=f"backend {name!r} under torch.vmap or another functional transform",
            expected="a plain call",
            do="pass backend='reference', or give the batch as leading axes of the sources",
        )


def second_derivative() -> BackendError:
    """Makes the error of a backend that is asked for second derivatives."""
    return BackendError(
        got="a backward pass with create_graph=True through a depth read",
        expected="first derivatives only",
        do="pass backend='reference' for second derivatives",
    )

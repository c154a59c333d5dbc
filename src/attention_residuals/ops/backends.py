"""The one door to depth attention: a backend is an argument, chosen with a reason."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import BackendError, nearest
from attention_residuals.ops import eager, reference
from attention_residuals.ops.depth_read import DepthRead

__all__ = ["BACKENDS", "depth_attention"]

BACKENDS: dict[str, Callable[..., DepthRead]] = {
    "eager": eager.depth_attention,
    "reference": reference.depth_attention,
}
"""Every backend by name, in the order in which ``"auto"`` tries them; eager can do every call."""


def depth_attention(
    sources: Sequence[Float[Tensor, "*BT D"]] | Float[Tensor, "S *BT D"],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
    backend: str = "auto",
) -> DepthRead:
    """Mixes the sources by softmax attention over depth, on the backend of your choice.

    Args:
        sources: What is read, a sequence of tensors or one stacked tensor; at least one source.
        pseudo_query: The learned vector of this site; zero gives the mean of the sources.
        key_gain: The learned gain of the key norm.
        eps: Added to the mean square of a source, >= 0.
        output_gain: Gain of the reader's RMSNorm; when given, ``mix`` is the normalised mix.
        output_eps: The eps of that norm; given together with ``output_gain``.
        backend: ``"auto"`` (the fastest that can do this call), ``"eager"`` or ``"reference"``.

    Returns:
        Mix, logits and inverse norms; ``.weights`` is the softmax of the logits.

    Raises:
        BackendError: There is no backend of that name.
        ShapeError: The tensors do not fit together.
        NonFiniteError: A source holds NaN or infinity (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), equations 1 to 6.

    Example:
        >>> import torch
        >>> sources = [torch.ones(2, 3), 3 * torch.ones(2, 3)]
        >>> depth_attention(sources, torch.zeros(3), torch.ones(3), eps=1e-6).mix[0]
        tensor([2., 2., 2.])
    """
    name = "eager" if backend == "auto" else backend
    if name not in BACKENDS:
        raise BackendError(
            got=f"backend={backend!r}", expected="'auto' or a known name", do=nearest(name, BACKENDS)
        )
    return BACKENDS[name](
        sources, pseudo_query, key_gain, eps=eps, output_gain=output_gain, output_eps=output_eps
    )

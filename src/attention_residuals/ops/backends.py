"""The one door to depth attention: a backend is an argument, chosen with a reason."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import BackendError, nearest
from attention_residuals.ops import eager, fla, fused, reference, traffic
from attention_residuals.ops.depth_read import DepthRead, compute_dtype

__all__ = ["BACKENDS", "Backend", "chosen_backend", "depth_attention", "depth_mix"]


_HUGE = 2.0**100
"""As a key norm's eps it drowns every mean square: the norm divides by 2^50, and the gain takes that back.
Powers of two, so no bit is lost."""

_INSTALLED = {package: importlib.util.find_spec(package) is not None for package in ("numba", "fla")}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute depth attention.

    Args:
        name: As the argument ``backend`` has it.
        run: The function that computes it.
        package: An optional package that it needs.
        devices: Device types that it runs on; empty for all.
        dtypes: Dtypes of sources that it takes; empty for all.
        takes_bias: It can add a ``logit_bias``.
        about: What it is, in a few words.
    """

    name: str
    run: Callable[..., DepthRead]
    package: str | None = None
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    takes_bias: bool = True
    about: str

    @property
    def missing(self) -> str | None:
        """Says what keeps it from running here at all, or None."""
        if self.package is not None and not _INSTALLED[self.package]:
            return f"the package {self.package} is not installed"
        if self.devices == ("cuda",) and not torch.cuda.is_available():
            return "there is no CUDA device"
        return None

    def refusal(self, source: Tensor, *, with_bias: bool) -> str | None:
        """Says why it cannot do a call, or None."""
        return self._refusal(source.device.type, source.dtype, with_bias)

    def _refusal(self, device: str, dtype: torch.dtype, with_bias: bool) -> str | None:
        if self.devices and device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, not on {device}"
        if self.dtypes and dtype not in self.dtypes:
            return f"it takes {' and '.join(str(dtype) for dtype in self.dtypes)}, not {dtype}"
        if with_bias and not self.takes_bias:
            return "it takes no logit_bias"
        return self.missing


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="cpu",
            run=fused.depth_attention,
            package="numba",
            devices=("cpu",),
            dtypes=(torch.float32, torch.bfloat16),
            about="fused kernels, compiled by numba at first use",
        ),
        Backend(
            name="fla",
            run=fla.depth_attention,
            package="fla",
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            takes_bias=False,
            about="the fused Triton op of flash-linear-attention",
        ),
        Backend(
            name="eager",
            run=eager.depth_attention,
            about="plain PyTorch, sources never stacked, backward by hand",
        ),
        Backend(
            name="reference",
            run=reference.depth_attention,
            about="the paper's formula; the only one with second derivatives and vmap",
        ),
    )
}
"""Every backend by name, in the order in which ``"auto"`` tries them; eager can do every call."""


def depth_attention(
    sources: Sequence[Float[Tensor, "*BT D"]] | Float[Tensor, "S *BT D"],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float | None,
    logit_bias: Float[Tensor, "S *BT"] | None = None,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
    backend: str = "auto",
) -> DepthRead:
    """Mixes the sources by softmax attention over depth, on the backend of your choice.

    All backends but the reference refuse second derivatives and ``torch.vmap``, and say so.

    Args:
        sources: What is read, a sequence of tensors or one stacked tensor; at least one source.
        pseudo_query: The learned vector of this site; zero gives the mean of the sources.
        key_gain: The learned gain of the key norm.
        eps: Added to the mean square of a source, >= 0. None leaves out the norm on keys; inverse norms
            are then 1.
        logit_bias: Is added to the logits; -inf takes a source away from a token.
        output_gain: Gain of the reader's RMSNorm; when given, ``mix`` is the normalised mix.
        output_eps: The eps of that norm; given together with ``output_gain``.
        backend: ``"auto"``, the first of ``BACKENDS`` that can do this call, or a name.

    Returns:
        Mix, logits and inverse norms; ``.weights`` is the softmax of the logits, and differentiable.

    Raises:
        BackendError: There is no backend of that name, or it cannot do this call.
        ShapeError: The tensors do not fit together.
        NonFiniteError: A source holds NaN or infinity, or a token has no source left (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), equations 1 to 6.

    Example:
        >>> import torch
        >>> sources = [torch.ones(2, 3), 3 * torch.ones(2, 3)]
        >>> depth_attention(sources, torch.zeros(3), torch.ones(3), eps=1e-6).mix[0]
        tensor([2., 2., 2.])
    """
    unstacked = sources.unbind(0) if isinstance(sources, Tensor) else sources
    chosen = chosen_backend(
        backend, unstacked[0] if len(unstacked) else torch.empty(0), logit_bias is not None
    )
    raw = eps is None and chosen.name != "reference"
    result = chosen.run(
        unstacked,
        pseudo_query,
        key_gain.to(compute_dtype(key_gain.dtype)) * _HUGE**0.5 if raw else key_gain,
        eps=_HUGE if raw else eps,
        logit_bias=logit_bias,
        output_gain=output_gain,
        output_eps=output_eps,
    )
    traffic.note(unstacked, (result.mix,))
    return result._replace(inverse_norms=torch.ones_like(result.inverse_norms)) if raw else result


def depth_mix(
    sources: Sequence[Float[Tensor, "*BT D"]],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*BT D"]:
    """Returns the mix of ``depth_attention`` alone; without gradients, the CPU kernels then keep no scores.

    Arguments and errors are those of ``depth_attention``.

    Example:
        >>> import torch
        >>> depth_mix([torch.ones(2, 3), 3 * torch.ones(2, 3)], torch.zeros(3), torch.ones(3), eps=1e-6)[0]
        tensor([2., 2., 2.])
    """
    given = (pseudo_query, key_gain)
    if sources and chosen_backend(backend, sources[0], False).name == "cpu":
        mix = fused.mix_alone(sources, *given, eps, output_gain, output_eps)
        if mix is not None:
            traffic.note(sources, (mix,))
            return mix
    return depth_attention(
        sources, *given, eps=eps, output_gain=output_gain, output_eps=output_eps, backend=backend
    ).mix


def chosen_backend(name: str, source: Tensor, with_bias: bool) -> Backend:
    """Returns the backend that a call runs on.

    Raises:
        BackendError: There is none of that name, or it cannot do the call.
    """
    if name == "auto":
        return _first(source.device, source.dtype, with_bias)
    if name not in BACKENDS:
        raise BackendError(
            got=f"backend={name!r}", expected="'auto' or a known name", do=nearest(name, BACKENDS)
        )
    reason = BACKENDS[name].refusal(source, with_bias=with_bias)
    if reason is not None:
        raise BackendError(
            got=f"backend={name!r} for {source.dtype} sources on {source.device.type}: {reason}",
            expected="a call that it can do",
            do="pass backend='auto', or see `attnres backends`",
        )
    return BACKENDS[name]


@functools.cache
def _first(device: torch.device, dtype: torch.dtype, with_bias: bool) -> Backend:
    """Returns the first backend that can do such calls; which one it is does not change in a process."""
    return next(b for b in BACKENDS.values() if b._refusal(device.type, dtype, with_bias) is None)

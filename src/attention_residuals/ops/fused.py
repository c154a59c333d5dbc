"""Depth attention on the CPU kernels, registered with PyTorch.

Compiled and exported graphs see one node forward and one backward. Outside of them the kernels are called
directly, which saves the dispatcher's microseconds.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from attention_residuals.ops import threads
from attention_residuals.ops.depth_read import (
    DepthRead,
    checked_sources,
    refuse_transforms,
    require_finite,
    second_derivative,
)

__all__ = [
    "SMALL",
    "SourceGradients",
    "address_of",
    "as_float32",
    "cpu_kernels",
    "current_total",
    "depth_attention",
    "is_plain",
    "mix_alone",
    "num_chunks_of",
    "share_gradients",
]

_TILE_BYTES = 2**18  # of the rows of all sources that are handled together: they stay in the L2 cache
_MAX_TILE, _MAX_CHUNKS, _CHUNK_TOKENS = 8, 64, 8
SMALL = 2**15
"""Numbers; for fewer, waking threads costs more than it saves."""

_PLAIN = (Tensor, nn.Parameter)

_LIBRARY = torch.library.Library("attention_residuals", "DEF")
_LIBRARY.define(
    "depth_attention(Tensor[] sources, Tensor pseudo_query, Tensor key_gain, float eps, Tensor? logit_bias, "
    "Tensor? output_gain, float output_eps) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "depth_attention_backward(Tensor? grad_mix, Tensor? grad_logits, Tensor[] sources, bool[] wanted, "
    "Tensor pseudo_query, Tensor key_gain, Tensor logits, Tensor inverse_norms, Tensor? logit_bias, "
    "Tensor? output_gain, Tensor output_norms) -> (Tensor[], Tensor, Tensor, Tensor, Tensor)"
)


def depth_attention(
    sources: Sequence[Float[Tensor, "*BT D"]] | Float[Tensor, "S *BT D"],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
    logit_bias: Float[Tensor, "S *BT"] | None = None,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
) -> DepthRead:
    """Mixes the sources by softmax attention over depth, on the CPU kernels.

    Arguments, results and errors are those of ``reference.depth_attention``, for float32 and bfloat16
    sources on the CPU. Gradients flow through ``mix`` and ``logits`` and only once.
    """
    unstacked = checked_sources(sources, pseudo_query, key_gain, logit_bias, output_gain, eps, output_eps)
    if not is_plain(unstacked[0]):
        refuse_transforms("cpu")
        mix, logits, inverse_norms, _ = torch.ops.attention_residuals.depth_attention(
            list(unstacked), pseudo_query, key_gain, eps, logit_bias, output_gain, output_eps or 0.0
        )
    elif torch.is_grad_enabled():
        mix, logits, inverse_norms, _ = _DepthAttention.apply(  # type: ignore[no-untyped-call]
            eps, output_eps or 0.0, pseudo_query, key_gain, logit_bias, output_gain, *unstacked
        )
    else:
        mix, logits, inverse_norms = results = _results(unstacked)
        given = (unstacked, pseudo_query, key_gain, eps, logit_bias, output_gain, output_eps or 0.0)
        if _fill((*results, None), *given):
            return DepthRead(*results)
    return require_finite(DepthRead(mix, logits, inverse_norms), logit_bias)


def mix_alone(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    output_gain: Tensor | None,
    output_eps: float | None,
) -> Tensor | None:
    """Returns the mix that ``depth_attention`` would, and keeps nothing else; None where it has more to do.

    Between large products all that a read touches comes from memory anew, down to the code that makes a
    tensor. A token's read costs less with one tensor than with three.

    Raises:
        ShapeError: The tensors do not fit together.
    """
    if torch.is_grad_enabled() or not is_plain(sources[0]):
        return None
    checked_sources(sources, pseudo_query, key_gain, None, output_gain, eps, output_eps)
    mix = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    results = (mix, None, None, None)
    all_finite = _fill(results, sources, pseudo_query, key_gain, eps, None, output_gain, output_eps or 0.0)
    return mix if all_finite else None


class SourceGradients(torch.autograd.Function):
    """Hands a source on as it is, and gathers the gradients of its reads in one tensor.

    Without it each read makes a gradient of its own for each source, and autograd adds them up: three more
    passes over memory each. With it, a read's backward adds straight to what is there.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        """Hands the source on."""
        ctx.set_materialize_grads(False)
        ctx.total, ctx.task = None, -1
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        """Hands back what was gathered, with what came by other ways."""
        total, ctx.total = current_total(ctx), None
        if total is None or grad is None:
            return grad if total is None else total
        return total.add_(grad)


def current_total(node: Any) -> Tensor | None:
    """Returns what this very backward pass has gathered; an earlier one may have ended before it was used."""
    return node.total if node.task == torch._C._current_graph_task_id() else None


def share_gradients(source: Tensor) -> Tensor:
    """Lets all reads of a source add to one gradient, where the kernels will run and autograd records."""
    if torch.is_grad_enabled() and source.requires_grad and is_plain(source):
        shared: Tensor = SourceGradients.apply(source)  # type: ignore[no-untyped-call]
        return shared
    return source


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        output_eps: float,
        pseudo_query: Tensor,
        key_gain: Tensor,
        logit_bias: Tensor | None,
        output_gain: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        operation = _forward if is_plain(sources[0]) else torch.ops.attention_residuals.depth_attention
        with torch._C._AutoDispatchBelowAutograd():
            mix, logits, inverse_norms, output_norms = operation(
                list(sources), pseudo_query, key_gain, eps, logit_bias, output_gain, output_eps
            )
        ctx.save_for_backward(
            pseudo_query, key_gain, logits, inverse_norms, logit_bias, output_gain, output_norms, *sources
        )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse_norms, output_norms)
        return mix, logits, inverse_norms, output_norms

    @staticmethod
    def backward(
        ctx: Any, grad_mix: Tensor | None, grad_logits: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and is_plain(grad_mix if grad_mix is not None else grad_logits):
            raise second_derivative()
        query, gain, logits, inverse_norms, bias, output_gain, output_norms, *sources = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[6:])
        arguments = (
            None if grad_mix is None else grad_mix.contiguous(),
            None if grad_logits is None else grad_logits.contiguous(),
            sources,
            wanted,
            query,
            gain,
            logits,
            inverse_norms,
            bias,
            output_gain,
            output_norms,
        )
        if is_plain(sources[0]):
            nodes = [node for node, _ in ctx.next_functions[-len(sources) :]]
            grads = _backward(*arguments, nodes=nodes)
        else:
            grads = torch.ops.attention_residuals.depth_attention_backward(*arguments)
        grad_sources, grad_query, grad_gain, grad_bias, grad_output_gain = grads
        return (
            None,
            None,
            grad_query,
            grad_gain,
            grad_bias if bias is not None else None,
            grad_output_gain if output_gain is not None else None,
            # Not wanted, or added to a shared one: empty.
            *(
                grad if grad.shape == source.shape else None
                for grad, source in zip(grad_sources, sources, strict=True)
            ),
        )


@functools.cache
def cpu_kernels() -> ModuleType:
    """Imports the kernels, and numba with them, when the first one is to run."""
    from attention_residuals.ops import cpu

    return cpu


def is_plain(tensor: Tensor | None) -> bool:
    """Tells whether the kernels may be called directly: real memory, and nobody who wants to see the call."""
    return (
        tensor is not None
        and type(tensor) in _PLAIN
        and tensor.is_cpu
        and not is_compiling()
        and _len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
    )


def _forward(
    sources: list[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mix, logits, inverse_norms = _results(sources)
    output_norms = torch.empty(
        logits.shape[1:] if output_gain is not None else 0, dtype=torch.float32, device="cpu"
    )
    results = (mix, logits, inverse_norms, output_norms)
    _fill(results, sources, pseudo_query, key_gain, eps, logit_bias, output_gain, output_eps)
    return results


def _results(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Makes room for mix, logits and inverse norms."""
    mix = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    logits = torch.empty((len(sources), *mix.shape[:-1]), dtype=torch.float32, device="cpu")
    return mix, logits, torch.empty_like(logits)


def _fill(
    results: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_eps: float,
) -> bool:
    """Runs the kernel forward.

    Results are mix, logits, inverse norms and norms of the mix; where there is None, nothing is written.

    Returns:
        Whether all logits are finite: the kernel has looked, since it costs much to look again.
    """
    cpu, (mix, logits, inverse_norms, output_norms) = cpu_kernels(), results
    sources = [in_order(source) for source in sources]
    query, norm_gain = as_float32(pseudo_query), as_float32(key_gain)
    bias, gain = as_float32(logit_bias), as_float32(output_gain)
    table = [0] * cpu.SOURCES
    table[cpu.KEY_GAIN] = address_of(norm_gain)
    table[cpu.EPS : cpu.MIX + 1] = (
        ctypes.addressof(_two_floats(eps, output_eps)),
        address_of(query),
        address_of(bias),
        address_of(gain),
        address_of(logits),
        address_of(inverse_norms),
        address_of(output_norms),
        mix.data_ptr(),
    )
    table += [source.data_ptr() for source in sources]
    return not _launch("forward", sources, table)[cpu.NOT_FINITE]


def _backward(
    grad_mix: Tensor | None,
    grad_logits: Tensor | None,
    sources: list[Tensor],
    wanted: list[bool],
    pseudo_query: Tensor,
    key_gain: Tensor,
    logits: Tensor,
    inverse_norms: Tensor,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_norms: Tensor,
    nodes: Sequence[Any] = (),
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    cpu = cpu_kernels()
    sources = [in_order(source) for source in sources]
    places = [
        _place(source, want, node)
        for source, want, node in zip(sources, wanted, nodes or [None] * len(sources), strict=True)
    ]
    grads, targets, added = map(list, zip(*places, strict=True))
    width, num_chunks = sources[0].shape[-1], num_chunks_of(sources[0])
    partial = torch.zeros(
        (1 if output_gain is None else 2, num_chunks, width), dtype=torch.float32, device="cpu"
    )
    direction = pseudo_query.float() * key_gain.float()
    bias, gain = as_float32(logit_bias), as_float32(output_gain)
    grad_bias = torch.empty_like(bias) if bias is not None else logits.new_empty(0)
    table = [0] * cpu.SOURCES
    table[cpu.DIRECTION : cpu.OUTPUT_NORM + 1] = (
        direction.data_ptr(),
        address_of(bias),
        address_of(gain),
        logits.data_ptr(),
        inverse_norms.data_ptr(),
        address_of(output_norms),
    )
    table[cpu.GRAD_MIX : cpu.GRAD_GAIN + 1] = (
        address_of(grad_mix),
        address_of(grad_logits),
        address_of(grad_bias),
        partial[0].data_ptr(),
        partial[-1].data_ptr(),
    )
    table += [*(source.data_ptr() for source in sources), *targets, *added]
    _launch("backward", sources, table)
    grad_direction = partial[0].sum(0)
    return (
        grads,
        (grad_direction * key_gain).to(pseudo_query.dtype),
        (grad_direction * pseudo_query).to(key_gain.dtype),
        grad_bias if logit_bias is None else grad_bias.to(logit_bias.dtype),
        logits.new_empty(0) if output_gain is None else partial[1].sum(0).to(output_gain.dtype),
    )


def _place(source: Tensor, wanted: bool, node: Any) -> tuple[Tensor, int, int]:
    """Finds where a source's gradient goes: what to return, the address to write to, and 1 to add there."""
    if not wanted:
        return source.new_empty(0), 0, 0
    shared = isinstance(node, SourceGradients._backward_cls)
    if not shared:
        grad = torch.empty_like(source)
        return grad, grad.data_ptr(), 0
    if (total := current_total(node)) is not None:
        return source.new_empty(0), total.data_ptr(), 1
    node.total, node.task = torch.empty_like(source), torch._C._current_graph_task_id()
    return source.new_empty(0), node.total.data_ptr(), 0


def _launch(direction: str, sources: list[Tensor], table: list[int]) -> "array[int]":
    """Completes a table of addresses with sizes, runs a kernel and returns the table."""
    cpu, first = cpu_kernels(), sources[0]
    num_sources, width, num_numbers = len(sources), first.shape[-1], first.numel()
    num_chunks = num_chunks_of(first)
    row_bytes = num_sources * width * first.element_size()
    tile = max(1, min(_MAX_TILE, _TILE_BYTES // max(1, row_bytes)))
    floats = 2 * tile * num_sources + (tile + 2) * width
    kept = num_chunks == 1
    scratch = (
        threads.scratch(floats)
        if kept
        else torch.empty(num_chunks * floats, dtype=torch.float32, device="cpu")
    )
    table[cpu.NUM_CHUNKS : cpu.SCRATCH_BYTES + 1] = (
        num_chunks,
        num_sources,
        num_numbers // max(1, width),
        width,
        tile,
        scratch.data_ptr(),
        4 * floats,
    )
    filled = array("q", table)
    small = num_chunks == 1 or num_sources * num_numbers < SMALL
    num_threads = 1 if small else min(torch.get_num_threads(), num_chunks)
    threads.run(cpu.kernel(direction, first.dtype), filled.buffer_info()[0], num_threads)
    return filled


def num_chunks_of(source: Tensor) -> int:
    """Says into how many pieces the tokens are cut.

    It depends on their number alone, so that the order of sums does not depend on threads.
    """
    num_tokens = source.numel() // max(1, source.shape[-1])
    return min(_MAX_CHUNKS, -(-num_tokens // _CHUNK_TOKENS))


def in_order(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers lie in order; one that is so already without a call of PyTorch's."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def as_float32(tensor: Tensor | None) -> Tensor | None:
    """Returns a tensor as a kernel takes it, or None."""
    if tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.float().contiguous()


@functools.cache
def _two_floats(first: float, second: float) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * 2)(first, second)


def address_of(tensor: Tensor | None) -> int:
    """Returns where a tensor's numbers lie; 0 where there are none."""
    return 0 if tensor is None else tensor.data_ptr()


def _registered(
    sources: list[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation under autograd, as the dispatcher calls it."""
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _DepthAttention.apply(  # type: ignore[no-untyped-call]
        eps, output_eps, pseudo_query, key_gain, logit_bias, output_gain, *sources
    )
    return outputs


def _fake_forward(
    sources: list[Tensor],
    pseudo_query: Tensor,
    key_gain: Tensor,
    eps: float,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    first = sources[0]
    rows = first.shape[:-1]
    logits = first.new_empty((len(sources), *rows), dtype=torch.float32)
    norms = first.new_empty(rows if output_gain is not None else 0, dtype=torch.float32)
    return first.new_empty(first.shape), logits, torch.empty_like(logits), norms


def _fake_backward(
    grad_mix: Tensor | None,
    grad_logits: Tensor | None,
    sources: list[Tensor],
    wanted: list[bool],
    pseudo_query: Tensor,
    key_gain: Tensor,
    logits: Tensor,
    inverse_norms: Tensor,
    logit_bias: Tensor | None,
    output_gain: Tensor | None,
    output_norms: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the gradients; what is not wanted is empty."""
    grads = [
        s.new_empty(s.shape) if want else s.new_empty(0) for s, want in zip(sources, wanted, strict=True)
    ]
    return (
        grads,
        torch.empty_like(pseudo_query),
        torch.empty_like(key_gain),
        logits.new_empty(0) if logit_bias is None else logit_bias.new_empty(logit_bias.shape),
        logits.new_empty(0) if output_gain is None else torch.empty_like(output_gain),
    )


_LIBRARY.impl("depth_attention", _forward, "CPU")
_LIBRARY.impl("depth_attention_backward", _backward, "CPU")
_LIBRARY.impl("depth_attention", _registered, "Autograd")
torch.library.register_fake("attention_residuals::depth_attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("attention_residuals::depth_attention_backward", _fake_backward, lib=_LIBRARY)

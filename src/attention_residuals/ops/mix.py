"""The two halves of a depth read apart, for rules whose weights are no plain softmax of one learned vector.

``depth_logits`` scores sources, ``weighted_mix`` mixes them with given weights. Neither stacks the sources;
for backward both keep references to them (they are alive anyway) and one number per source, token and head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ShapeError
from attention_residuals.ops import traffic
from attention_residuals.ops.depth_read import checked_sources, compute_dtype, second_derivative
from attention_residuals.ops.eager import inverse_rms, norm_backward, without_autocast

__all__ = ["DepthLogits", "depth_logits", "weighted_mix"]


class DepthLogits(NamedTuple):
    """Scores of sources; with heads, one for each group of channels. Inverse norms carry no gradient."""

    logits: Float[Tensor, "S *BTH"]
    inverse_norms: Float[Tensor, "S *BTH"]


def depth_logits(
    sources: Sequence[Float[Tensor, "*BT D"]],
    direction: Float[Tensor, " D"] | Float[Tensor, "*BT D"],
    *,
    eps: float,
    num_heads: int | None = None,
    norm_per_head: bool = False,
) -> DepthLogits:
    """Scores each source by its product with a direction over its root mean square.

    Args:
        sources: What is scored; at least one.
        direction: Query times key gain, one for all tokens or one for each.
        eps: Added to the mean square, >= 0.
        num_heads: Score groups of channels apart; both results then end in an axis H.
        norm_per_head: Divide by the root mean square of the group, not of the whole source.

    Raises:
        ShapeError: The tensors do not fit together, or heads do not divide the width.

    Example:
        >>> depth_logits([torch.ones(1, 4), 2 * torch.ones(1, 4)], torch.ones(4), eps=0.0).logits.tolist()
        [[4.0], [4.0]]
    """
    unstacked = checked_sources(sources, None, None, None, None, eps, None)
    width = unstacked[0].shape[-1]
    heads = 1 if num_heads is None else num_heads
    if heads < 1 or width % heads:
        raise ShapeError(
            got=f"num_heads={heads} for sources of width {width}",
            expected="a divisor of the width",
            do=f"use one of {[n for n in range(1, width + 1) if width % n == 0]}",
        )
    if direction.shape not in ((width,), unstacked[0].shape):
        raise ShapeError(
            got=f"a direction of shape {list(direction.shape)}",
            expected=f"[{width}] or {list(unstacked[0].shape)}",
            do="pass one vector for all tokens, or one for each",
        )
    traffic.note(unstacked)
    logits, inverse_norms = _Logits.apply(  # type: ignore[no-untyped-call]
        eps, heads, norm_per_head, direction, *unstacked
    )
    shape = (len(unstacked), *unstacked[0].shape[:-1])
    if num_heads is not None:
        return DepthLogits(logits.view(*shape, heads), inverse_norms.expand_as(logits).view(*shape, heads))
    return DepthLogits(logits.view(shape), inverse_norms.view(shape))


def weighted_mix(
    weights: Float[Tensor, "S *BTH"],
    sources: Sequence[Float[Tensor, "*BT D"]],
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
) -> Float[Tensor, "*BT D"]:
    """Mixes sources with given weights, and normalises the mix where a gain is given.

    Args:
        weights: One for each source and token; with a last axis H, one for each group of channels.
        sources: What is mixed.
        output_gain: Gain of the reader's RMSNorm.
        output_eps: The eps of that norm; given together with ``output_gain``.

    Raises:
        ShapeError: The tensors do not fit together.

    Example:
        >>> weighted_mix(torch.tensor([[2.0], [-1.0]]), [torch.ones(1, 2), torch.ones(1, 2)])
        tensor([[1., 1.]])
    """
    unstacked = checked_sources(sources, None, None, None, output_gain, 0.0, output_eps)
    tokens, width = unstacked[0].shape[:-1], unstacked[0].shape[-1]
    with_heads = weights.ndim == len(tokens) + 2 and width % weights.shape[-1] == 0
    expected = (len(unstacked), *tokens, *weights.shape[-1:]) if with_heads else (len(unstacked), *tokens)
    if weights.shape != expected:
        raise ShapeError(
            got=f"weights of shape {list(weights.shape)}",
            expected=f"{[len(unstacked), *tokens]}, and a divisor of {width} where heads have weights apart",
            do="pass a weight for each source and token",
        )
    weight_SNH = weights.reshape(len(unstacked), tokens.numel(), -1)
    mix: Tensor = _Mix.apply(weight_SNH, output_gain, output_eps, *unstacked)  # type: ignore[no-untyped-call]
    traffic.note(unstacked, (mix,))
    return mix


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, heads: int, norm_per_head: bool, direction: Tensor, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(sources[0].dtype)
        with without_autocast(sources[0].device.type):
            direction_NHK = _heads(direction, heads, dtype)
            values_NHK = [_heads(source, heads, dtype) for source in sources]
            norms = [
                inverse_rms(value if norm_per_head else value.flatten(1).unsqueeze(1), eps)
                for value in values_NHK
            ]
            inverse_norm_SNH = torch.stack(norms)
            logit_SNH = torch.stack([torch.linalg.vecdot(value, direction_NHK) for value in values_NHK])
            logit_SNH *= inverse_norm_SNH
        ctx.save_for_backward(direction, logit_SNH, inverse_norm_SNH, *sources)
        ctx.mark_non_differentiable(inverse_norm_SNH)
        return logit_SNH, inverse_norm_SNH

    @staticmethod
    def backward(ctx: Any, grad_SNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        direction, logit_SNH, inverse_norm_SNH, *sources = ctx.saved_tensors
        dtype, heads = logit_SNH.dtype, logit_SNH.shape[-1]
        direction_NHK = _heads(direction, heads, dtype)
        dot_SNH = grad_SNH * inverse_norm_SNH  # gradient of value . direction
        through_SNH = grad_SNH * logit_SNH
        if inverse_norm_SNH.shape[-1] == 1:  # one norm for all heads
            through_SNH = through_SNH.sum(-1, keepdim=True)
        num_normed = sources[0].shape[-1] // inverse_norm_SNH.shape[-1]
        square_SNH = through_SNH * inverse_norm_SNH.square() / num_normed
        grad_direction = torch.zeros_like(direction, dtype=dtype)
        grad_sources: list[Tensor | None] = []
        with without_autocast(sources[0].device.type):
            for number, source in enumerate(sources):
                value_NHK, dot_NH1 = _heads(source, heads, dtype), dot_SNH[number, ..., None]
                if direction.ndim == 1:
                    grad_direction += torch.einsum("nh,nhk->hk", dot_SNH[number], value_NHK).flatten()
                else:
                    grad_direction.view_as(value_NHK).addcmul_(value_NHK, dot_NH1)
                if not ctx.needs_input_grad[4 + number]:
                    grad_sources.append(None)
                    continue
                grad_NHK = dot_NH1 * direction_NHK
                grad_NHK.addcmul_(value_NHK, square_SNH[number, ..., None], value=-1)
                grad_sources.append(grad_NHK.view(source.shape).to(source.dtype))
        return None, None, None, grad_direction.to(direction.dtype), *grad_sources


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_SNH: Tensor, output_gain: Tensor | None, output_eps: float | None, *sources: Tensor
    ) -> Tensor:
        dtype = compute_dtype(sources[0].dtype)
        mix_ND = _mix(weight_SNH, sources, dtype)
        output_norm_N = None
        if output_gain is not None and output_eps is not None:
            output_norm_N = inverse_rms(mix_ND, output_eps)
            mix_ND.mul_(output_norm_N[:, None]).mul_(output_gain.to(dtype))
        ctx.save_for_backward(weight_SNH, output_gain, output_norm_N, *sources)
        return mix_ND.view(sources[0].shape).to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad_mix: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        weight_SNH, output_gain, output_norm_N, *sources = ctx.saved_tensors
        dtype, heads = compute_dtype(sources[0].dtype), weight_SNH.shape[-1]
        grad_ND = grad_mix.reshape(weight_SNH.shape[1], -1).to(dtype)
        grad_gain = None
        if output_norm_N is not None:
            mix_ND = _mix(weight_SNH, sources, dtype)
            grad_ND, grad_gain = norm_backward(grad_ND, mix_ND, output_gain, output_norm_N)
        grad_NHK = _heads(grad_ND, heads, dtype)
        grad_weight_SNH = None
        if ctx.needs_input_grad[0]:
            grad_weight_SNH = torch.stack(
                [torch.linalg.vecdot(_heads(source, heads, dtype), grad_NHK) for source in sources]
            ).to(weight_SNH.dtype)
        grad_sources = [
            (grad_NHK * weight_NH[..., None].to(dtype)).view(source.shape).to(source.dtype)
            if wanted
            else None
            for weight_NH, source, wanted in zip(weight_SNH, sources, ctx.needs_input_grad[3:], strict=True)
        ]
        return grad_weight_SNH, grad_gain, None, *grad_sources


def _heads(tensor: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Views [..., D] as [N, H, K]; one vector becomes [1, H, K]."""
    return tensor.to(dtype).reshape(-1, heads, tensor.shape[-1] // heads)


def _mix(weight_SNH: Tensor, sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight_SNH, heads = weight_SNH.to(dtype), weight_SNH.shape[-1]
    mix_NHK = _heads(sources[0], heads, dtype) * weight_SNH[0, ..., None]
    for weight_NH, source in zip(weight_SNH[1:], sources[1:], strict=True):
        mix_NHK.addcmul_(_heads(source, heads, dtype), weight_NH[..., None])
    return mix_NHK.flatten(1)

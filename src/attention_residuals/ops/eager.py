"""Depth attention in plain PyTorch, with the sources never stacked and the backward pass by hand.

The key norm is folded into one number per source and token: the logit of source v is
(v . (query * gain)) / rms(v), so no normalised key is ever built. Forward keeps references to the sources
(which are alive anyway) and float32 scalars; the mix is made again in backward where it is needed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.ops.depth_read import (
    DepthRead,
    checked_sources,
    compute_dtype,
    refuse_transforms,
    require_finite,
    second_derivative,
)

__all__ = ["depth_attention", "inverse_rms", "mixed", "norm_backward", "without_autocast"]


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
    """Mixes the sources by softmax attention over depth, without stacking them.

    Arguments, results and errors are those of ``reference.depth_attention``, with two differences:
    gradients flow through ``mix`` and ``logits`` but not through ``inverse_norms``, and only once (no
    second derivatives).

    Example:
        >>> sources = [torch.ones(2, 3), 3 * torch.ones(2, 3)]
        >>> depth_attention(sources, torch.zeros(3), torch.ones(3), eps=1e-6).mix[0]
        tensor([2., 2., 2.])
    """
    refuse_transforms("eager")
    unstacked = checked_sources(sources, pseudo_query, key_gain, logit_bias, output_gain, eps, output_eps)
    mix, logits, inverse_norms = _EagerDepthAttention.apply(  # type: ignore[no-untyped-call]
        eps, output_eps, pseudo_query, key_gain, logit_bias, output_gain, *unstacked
    )
    return require_finite(DepthRead(mix, logits, inverse_norms), logit_bias)


def mixed(weights: Tensor, values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Adds up weighted values in a dtype, without stacking them."""
    mix = values[0].to(dtype) * weights[0, ..., None]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        mix.addcmul_(value.to(dtype), weight[..., None])
    return mix


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Turns autocast off, under which a matrix-vector product would run in bfloat16."""
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()


def inverse_rms(hidden: Float[Tensor, "*BT D"], eps: float) -> Float[Tensor, "*BT"]:
    """Returns one over the root mean square of the last axis, eps added to the mean square."""
    square: Tensor = torch.linalg.vecdot(hidden, hidden)
    return (square / hidden.shape[-1] + eps).rsqrt()


class _EagerDepthAttention(torch.autograd.Function):
    """Forward and backward over sources flattened to [N, D], where N is the number of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        output_eps: float | None,
        pseudo_query: Tensor,
        key_gain: Tensor,
        logit_bias: Tensor | None,
        output_gain: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = compute_dtype(sources[0].dtype)
        with without_autocast(sources[0].device.type):
            direction_D = pseudo_query.to(dtype) * key_gain.to(dtype)
            inverse_norms = torch.stack([inverse_rms(source.to(dtype), eps) for source in sources])
            scores = torch.stack([source.to(dtype) @ direction_D for source in sources]) * inverse_norms
            logits = scores if logit_bias is None else scores + logit_bias.to(dtype)
            mix = mixed(logits.softmax(0), sources, dtype)
            output_norm = None
            if output_gain is not None and output_eps is not None:
                output_norm = inverse_rms(mix, output_eps)
                mix.mul_(output_norm[..., None]).mul_(output_gain.to(dtype))
        ctx.save_for_backward(
            pseudo_query, key_gain, output_gain, scores, logits, inverse_norms, output_norm, *sources
        )
        ctx.bias_dtype = None if logit_bias is None else logit_bias.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse_norms)
        return mix.to(sources[0].dtype), logits, inverse_norms

    @staticmethod
    def backward(
        ctx: Any, grad_mix: Tensor | None, grad_logits: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        pseudo_query, key_gain, output_gain, *others = ctx.saved_tensors
        scalars, output_norm, sources = others[:3], others[3], others[4:]
        score_SN, logit_SN, inverse_norm_SN = (scalar.flatten(1) for scalar in scalars)
        output_norm_N = None if output_norm is None else output_norm.flatten()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        shape, dtype = sources[0].shape, logit_SN.dtype
        value_NDs = [source.reshape(-1, shape[-1]) for source in sources]
        weight_SN = logit_SN.softmax(0)
        with without_autocast(sources[0].device.type):
            grad_output_gain = None
            grad_logit_SN = torch.zeros_like(logit_SN)
            if grad_mix is not None:
                grad_ND = grad_mix.reshape(-1, shape[-1]).to(dtype)
                if output_norm_N is not None:
                    mix_ND = mixed(weight_SN, value_NDs, dtype)
                    grad_ND, grad_output_gain = norm_backward(grad_ND, mix_ND, output_gain, output_norm_N)
                grad_weight_SN = torch.stack(
                    [torch.linalg.vecdot(value.to(dtype), grad_ND) for value in value_NDs]
                )
                mean_N = (weight_SN * grad_weight_SN).sum(0)
                grad_logit_SN = weight_SN * (grad_weight_SN - mean_N)
            if grad_logits is not None:
                grad_logit_SN = grad_logit_SN + grad_logits.reshape(logit_SN.shape)

            direction_D = pseudo_query.to(dtype) * key_gain.to(dtype)
            dot_SN = grad_logit_SN * inverse_norm_SN  # gradient of value . direction
            square_SN = dot_SN * score_SN * inverse_norm_SN / shape[-1]  # through the inverse norm
            grad_direction_D = torch.zeros_like(direction_D)
            grad_sources: list[Tensor | None] = []
            for number, value_ND in enumerate(value_NDs):
                grad_direction_D += dot_SN[number] @ value_ND.to(dtype)
                if not ctx.needs_input_grad[6 + number]:
                    grad_sources.append(None)
                    continue
                grad_value_ND = torch.outer(dot_SN[number], direction_D)
                grad_value_ND.addcmul_(value_ND.to(dtype), square_SN[number, :, None], value=-1)
                if grad_mix is not None:
                    grad_value_ND.addcmul_(grad_ND, weight_SN[number, :, None])
                grad_sources.append(grad_value_ND.view(shape).to(sources[0].dtype))
        return (
            None,
            None,
            (grad_direction_D * key_gain).to(pseudo_query.dtype),
            (grad_direction_D * pseudo_query).to(key_gain.dtype),
            None if ctx.bias_dtype is None else grad_logit_SN.view_as(scalars[0]).to(ctx.bias_dtype),
            grad_output_gain,
            *grad_sources,
        )


def norm_backward(
    grad_ND: Tensor, mix_ND: Tensor, output_gain: Tensor, output_norm_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of mix * output_norm * output_gain with respect to the mix and the gain."""
    normalised_ND = mix_ND.mul_(output_norm_N[:, None])
    grad_output_gain = (grad_ND * normalised_ND).sum(0).to(output_gain.dtype)
    grad_normalised_ND = grad_ND * output_gain.to(grad_ND.dtype)
    projection_N = torch.linalg.vecdot(grad_normalised_ND, normalised_ND) / mix_ND.shape[-1]
    grad_normalised_ND.addcmul_(normalised_ND, projection_N[:, None], value=-1)
    return grad_normalised_ND.mul_(output_norm_N[:, None]), grad_output_gain

"""Depth attention on the fused Triton op of flash-linear-attention, for CUDA."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.ops.depth_read import DepthRead, checked_sources, compute_dtype, refuse_transforms

__all__ = ["depth_attention"]


def depth_attention(
    sources: Sequence[Float[Tensor, "*BT D"]] | Float[Tensor, "S *BT D"],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float,
    logit_bias: None = None,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
) -> DepthRead:
    """Mixes the sources by softmax attention over depth, on FLA's fused op.

    Arguments and results are those of ``reference.depth_attention``, without a bias. FLA returns no logits;
    they are computed from the sources by one more pass, with gradients of their own. FLA has one eps for
    keys and output, so the output norm is folded in only where both are equal.

    Source:
        flash-linear-attention (fla-core), ``fla.ops.attnres.fused_attnres``.
    """
    from fla.ops.attnres import fused_attnres

    refuse_transforms("fla")
    unstacked = checked_sources(sources, pseudo_query, key_gain, logit_bias, output_gain, eps, output_eps)
    folded = output_gain if output_eps == eps else None
    mix = fused_attnres(pseudo_query, unstacked, key_gain, output_rms_weight=folded, rms_eps=eps)
    if output_gain is not None and folded is None:
        mix = torch.nn.functional.rms_norm(mix, output_gain.shape, output_gain.to(mix.dtype), output_eps)
    dtype = compute_dtype(mix.dtype)
    direction = pseudo_query.to(dtype) * key_gain.to(dtype)
    values = [source.to(dtype) for source in unstacked]
    inverse_norms = torch.stack([(value.square().mean(-1) + eps).rsqrt() for value in values])
    logits = torch.stack([value @ direction for value in values]) * inverse_norms
    return DepthRead(mix, logits, inverse_norms)

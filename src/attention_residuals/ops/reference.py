"""Depth attention exactly as published: the definition that every other path is tested against."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.ops.depth_read import DepthRead, checked_sources, compute_dtype, require_finite

__all__ = ["depth_attention", "weighted_sum"]


def depth_attention(
    sources: Sequence[Float[Tensor, "*BT D"]] | Float[Tensor, "S *BT D"],
    pseudo_query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"],
    *,
    eps: float | None,
    logit_bias: Float[Tensor, "S *BT"] | None = None,
    output_gain: Float[Tensor, " D"] | None = None,
    output_eps: float | None = None,
) -> DepthRead:
    """Mixes the sources by softmax attention over depth.

    Keys are the RMS-normalised sources times a gain, values are the raw sources, the query is one
    learned vector, and the scores are not scaled. Everything is computed in float32 (float64 for
    float64 sources) and cast once at the end.

    Args:
        sources: What is read, a sequence of tensors or one stacked tensor; at least one source.
        pseudo_query: The learned vector of this site; zero gives the mean of the sources.
        key_gain: The learned gain of the key norm.
        eps: Added to the mean square of a source, >= 0. None leaves out the norm on keys.
        logit_bias: Is added to the logits; -inf takes a source away from a token.
        output_gain: Gain of the reader's RMSNorm; when given, ``mix`` is the normalised mix.
        output_eps: The eps of that norm; given together with ``output_gain``.

    Returns:
        Mix, logits and inverse norms, all differentiable; ``.weights`` is the softmax of the logits.

    Raises:
        ShapeError: The tensors do not fit together.
        NonFiniteError: A source holds NaN or infinity, or a token has no source left (checked on the CPU).

    Source:
        Attention Residuals (arXiv:2603.15031), equations 1 to 6.

    Example:
        >>> embedding, attention_output = torch.ones(2, 3), 3 * torch.ones(2, 3)
        >>> read = depth_attention([embedding, attention_output], torch.zeros(3), torch.ones(3), eps=1e-6)
        >>> read.mix[0], read.weights[:, 0]
        (tensor([2., 2., 2.]), tensor([0.5000, 0.5000]))
    """
    unstacked = checked_sources(sources, pseudo_query, key_gain, logit_bias, output_gain, eps, output_eps)
    dtype = compute_dtype(unstacked[0].dtype)
    value = torch.stack(unstacked).to(dtype)
    inverse_norms = (value.square().mean(-1) + (eps or 0.0)).rsqrt()
    if eps is None:
        inverse_norms = torch.ones_like(inverse_norms)
    key = value * inverse_norms.unsqueeze(-1) * key_gain.to(dtype)
    logits = (key * pseudo_query.to(dtype)).sum(-1)
    if logit_bias is not None:
        logits = logits + logit_bias.to(dtype)
    mix = (logits.softmax(0).unsqueeze(-1) * value).sum(0)
    if output_gain is not None and output_eps is not None:
        mix = mix * (mix.square().mean(-1, keepdim=True) + output_eps).rsqrt() * output_gain.to(dtype)
    return require_finite(DepthRead(mix.to(unstacked[0].dtype), logits, inverse_norms), logit_bias)


def weighted_sum(
    weights: Float[Tensor, "S *BTH"], values: Sequence[Float[Tensor, "*BT D"]]
) -> Float[Tensor, "*BT D"]:
    """Mixes values with given weights, in float32 (float64 for float64 values) with one final cast.

    This is how a read that a tap has changed becomes a state again. Weights with a last axis of heads are
    those of as many groups of channels.

    Example:
        >>> weighted_sum(torch.tensor([[0.25], [0.75]]), [torch.zeros(1, 2), torch.ones(1, 2)])
        tensor([[0.7500, 0.7500]])
    """
    value = torch.stack(tuple(values)).to(compute_dtype(values[0].dtype))
    weights = weights.to(value.dtype)
    if weights.ndim < value.ndim:
        weights = weights.unsqueeze(-1)
    groups = value.unflatten(-1, (weights.shape[-1], -1))
    mix: Tensor = (weights.unsqueeze(-1) * groups).sum(0).flatten(-2)
    return mix.to(values[0].dtype)

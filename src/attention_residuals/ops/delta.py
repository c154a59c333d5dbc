"""The gated delta rule of Kimi Delta Attention: a memory that forgets by channel, a token or a chunk at a time."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, ShapeError, is_count
from attention_residuals.ops.depth_read import compute_dtype

__all__ = ["CHUNK", "Recalled", "chunked_delta_rule", "delta_rule"]

CHUNK = 32
"""Tokens that the rule takes at once."""

FORGOTTEN = -1e4
"""A decay below which nothing is left in any dtype, and which a chunk can add up without infinity."""


class Recalled(NamedTuple):
    """What the queries read, and the memory after the last token."""

    output: Float[Tensor, "B T H V"]
    memory: Float[Tensor, "B H K V"]


def delta_rule(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H K"],
    rate: Float[Tensor, "B T H"],
    *,
    memory: Float[Tensor, "B H K V"] | None = None,
) -> Recalled:
    """Runs the recurrence as it is written, token by token: the definition, and slow.

    A token lets every channel of the memory M decay, corrects what the memory recalls for its key, and reads:
    ``M = exp(log_decay) * M``; ``M = M + rate * key (value - M^T key)^T``; ``output = M^T query``.
    Computed in float32, or float64 for float64.

    Args:
        query: What is read with; scale it by K**-0.5 beforehand.
        key: Under what is written, usually of length 1.
        value: What is written.
        log_decay: Logarithm of what each channel keeps, <= 0; -inf forgets all.
        rate: How much of the correction is made, 0 to 1.
        memory: Of the tokens before; empty by default.

    Raises:
        ShapeError: The tensors do not fit together.

    Source:
        Kimi Linear (arXiv:2510.26692), equation 1.

    Example:
        >>> key, value = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[3.0]]]])
        >>> delta_rule(key, key, value, torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1)).output
        tensor([[[[3.]]]])
    """
    dtype, memory = compute_dtype(query.dtype), _checked(query, key, value, log_decay, rate, memory)
    query_, key_, value_, log_decay_, rate_ = (
        tensor.to(dtype) for tensor in (query, key, value, log_decay, rate)
    )
    kept = log_decay_.exp()
    outputs = []
    for token in range(query.shape[1]):
        memory = memory * kept[:, token, :, :, None]
        recalled = (memory * key_[:, token, :, :, None]).sum(2)
        correction = rate_[:, token, :, None] * (value_[:, token] - recalled)
        memory = memory + key_[:, token, :, :, None] * correction[:, :, None]
        outputs.append((memory * query_[:, token, :, :, None]).sum(2))
    return Recalled(torch.stack(outputs, 1).to(query.dtype), memory)


def chunked_delta_rule(
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H K"],
    rate: Float[Tensor, "B T H"],
    *,
    memory: Float[Tensor, "B H K V"] | None = None,
    chunk: int = CHUNK,
) -> Recalled:
    """Computes what ``delta_rule`` does, with matrix products over chunks of tokens.

    Inside a chunk, the corrections of all tokens solve one triangular system (the WY form of a product of
    Householder-like updates); from chunk to chunk only the memory goes on. The decay between two tokens is
    never a quotient of decays, which would underflow: tokens are paired by halves of 2, 4, 8, ... tokens, and
    what decays on the way is the product of two factors, up to and from the middle, each at most 1.

    Args:
        query: What is read with; scale it by K**-0.5 beforehand.
        key: Under what is written, usually of length 1.
        value: What is written.
        log_decay: Logarithm of what each channel keeps, <= 0; -inf forgets all.
        rate: How much of the correction is made, 0 to 1.
        memory: Of the tokens before; empty by default.
        chunk: Tokens at once, a power of 2.

    Raises:
        ShapeError: The tensors do not fit together.
        ConfigError: The chunk is no power of 2.

    Source:
        Kimi Linear (arXiv:2510.26692), section 3.2; Yang et al. (DeltaNet in chunks), arXiv:2406.06484.

    Example:
        >>> drawn = [torch.randn(1, 5, 2, 4) for _ in range(3)]
        >>> decay, rate = -torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2)
        >>> found, expected = (rule(*drawn, decay, rate) for rule in (chunked_delta_rule, delta_rule))
        >>> torch.allclose(found.output, expected.output, atol=1e-5)
        True
    """
    if not is_count(chunk) or chunk & (chunk - 1):
        raise ConfigError(got=f"chunk={chunk!r}", expected="a power of 2", do="32 suits CPUs, 64 GPUs")
    dtype, memory = compute_dtype(query.dtype), _checked(query, key, value, log_decay, rate, memory)
    length = query.shape[1]
    chunk = min(chunk, 1 << (length.bit_length() - 1))
    query_, key_, value_, log_decay_, rate_ = (
        _in_chunks(tensor.to(dtype), chunk) for tensor in (query, key, value, log_decay, rate[..., None])
    )
    with torch.autocast(query.device.type, enabled=False):  # in which products would be of 16 bits
        output, memory = _in_products(query_, key_, value_, log_decay_, rate_, memory)
    return Recalled(output[:, :, :length].transpose(1, 2).to(query.dtype), memory)


def _in_products(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H K V"]]:
    """Runs the rule on tensors in chunks, [B, H, N, C, K] and the like."""
    chunk = query.shape[-2]
    spans = (_spans(chunk, log_decay) @ log_decay.clamp_min(FORGOTTEN)).exp()
    between, since, until = spans.unflatten(-2, (-1, chunk)).split([chunk.bit_length() - 1, 1, 1], -3)
    since, until = since.squeeze(-3), until.squeeze(-3)
    scores, overlaps = _Within.apply(query, key, between)  # type: ignore[no-untyped-call]
    solved = torch.linalg.solve_triangular(
        rate * overlaps,
        rate * torch.cat([value, key * since], -1),
        upper=False,
        unitriangular=True,
    )
    wanted, replaced = solved.split([value.shape[-1], key.shape[-1]], -1)
    memories, corrections = [], []
    # Unbound at once: a chunk that is picked out has a gradient as large as all chunks.
    for want, replace, keep, add in zip(
        *(part.unbind(2) for part in (wanted, replaced, since[..., -1, :, None], (key * until).mT)),
        strict=True,
    ):
        memories.append(memory)
        corrections.append(want - replace @ memory)
        memory = keep * memory + add @ corrections[-1]
    output = (query * since) @ torch.stack(memories, 2) + scores @ torch.stack(corrections, 2)
    return output.flatten(2, 3), memory


class _Within(torch.autograd.Function):
    """Multiplies queries and keys with the keys of earlier tokens of their chunk, decayed on the way.

    ``decay`` holds for halves of 1, 2, 4, ... tokens what decays from each token to the end of its first half,
    or from the start of its second half to it. Backward is written out, since views that are written to and
    added to in place take a third of the time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, decay)
        scores = query.new_zeros(*query.shape[:-1], query.shape[-2])
        overlaps = torch.zeros_like(scores)
        scores.diagonal(0, -2, -1).copy_((query * key).sum(-1))
        for level, kept in enumerate(decay.unbind(-3)):
            asking, later, earlier = _decayed(query, key, kept, level)
            _across(scores, level).copy_(_overlap(asking, earlier))
            _across(overlaps, level).copy_(_overlap(later, earlier))
        return scores, overlaps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor, d_overlaps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, decay = ctx.saved_tensors
        d_own = d_scores.diagonal(0, -2, -1)[..., None]
        d_query, d_key, d_decay = d_own * key, d_own * query, torch.empty_like(decay)
        for level, (kept, d_kept) in enumerate(zip(decay.unbind(-3), d_decay.unbind(-3), strict=True)):
            asking, later, earlier = _decayed(query, key, kept, level)
            d_score, d_overlap = _across(d_scores, level), _across(d_overlaps, level)
            d_asking, d_later = _times(d_score, earlier), _times(d_overlap, earlier)
            d_earlier = _times(d_score.mT, asking) + _times(d_overlap.mT, later)
            (early, late), (d_early, d_late) = _halves(kept, level), _halves(d_kept, level)
            (early_key, late_key), (d_early_key, d_late_key) = _halves(key, level), _halves(d_key, level)
            d_early.copy_(d_earlier * early_key)
            d_late.copy_(d_asking * _halves(query, level)[1]).addcmul_(d_later, late_key)
            _halves(d_query, level)[1].addcmul_(d_asking, late)
            d_late_key.addcmul_(d_later, late)
            d_early_key.addcmul_(d_earlier, early)
        return d_query, d_key, d_decay


def _halves(tensor: Tensor, level: int) -> tuple[Tensor, ...]:
    """Views the first and the second halves of all groups of 2 << level tokens."""
    groups: Tensor = tensor.unflatten(-2, (-1, 2, 1 << level))
    return groups.unbind(-3)


def _decayed(query: Tensor, key: Tensor, decay: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
    """Makes queries and keys of second halves as they meet their middle, and keys of first halves."""
    (early, late), (early_key, late_key) = _halves(decay, level), _halves(key, level)
    return _halves(query, level)[1] * late, late_key * late, early_key * early


def _overlap(one: Tensor, other: Tensor) -> Any:
    """Multiplies all vectors of one with all of the other; thousands of single ones are no work for BLAS."""
    return (one * other).sum(-1, keepdim=True) if one.shape[-2] == 1 else one @ other.mT


def _times(matrix: Tensor, vectors: Tensor) -> Any:
    """Multiplies a matrix with vectors, one of each by elements."""
    return matrix * vectors if matrix.shape[-1] == 1 else matrix @ vectors


def _across(matrices: Tensor, level: int) -> Tensor:
    """Views the blocks in which second halves of groups meet the first halves."""
    halves = (-1, 2, 1 << level)
    blocks: Tensor = matrices.unflatten(-1, halves).unflatten(-4, halves)[..., 1, :, :, 0, :]
    return blocks.diagonal(0, -4, -2).movedim(-1, -3)


def _spans(chunk: int, like: Tensor) -> Float[Tensor, "X C"]:
    """Makes the matrix that adds up the decays that lie between two places of a chunk.

    Its rows are as many blocks of a row for each token: ``between`` for halves of 1, 2, 4, ... tokens, then
    from the start of the chunk up to each token, then from each token to the end of the chunk.
    """
    half = (1 << torch.arange(chunk.bit_length() - 1, device=like.device))[:, None, None]
    token, other = (torch.arange(chunk, device=like.device).view(shape) for shape in ((-1, 1), (1, -1)))
    middle = token // (2 * half) * 2 * half + half
    before, after = other <= token, other > token
    between = torch.where(token < middle, after & (other < middle), before & (other >= middle))
    return torch.cat([between, before[None], after[None]]).to(like.dtype).flatten(0, 1)


def _in_chunks(tensor: Float[Tensor, "B T H X"], chunk: int) -> Float[Tensor, "B H N C X"]:
    """Fills the last chunk with tokens that write nothing, read nothing and keep all."""
    padded = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % chunk))
    chunks: Tensor = padded.transpose(1, 2).unflatten(2, (-1, chunk))
    return chunks.contiguous()


def _checked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, memory: Tensor | None
) -> Float[Tensor, "B H K V"]:
    """Checks shapes, and returns the memory to begin with."""
    batch, length, heads, width = query.shape if query.ndim == 4 else (0, 0, 0, 0)
    shape = (batch, heads, width, value.shape[-1])
    fits = (
        length > 0
        and key.shape == log_decay.shape == query.shape
        and value.shape[:-1] == rate.shape == query.shape[:-1]
        and (memory is None or memory.shape == shape)
    )
    if not fits:
        raise ShapeError(
            got=f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}, log_decay "
            f"{list(log_decay.shape)}, rate {list(rate.shape)}, memory "
            f"{None if memory is None else list(memory.shape)}",
            expected="[B, T, H, K] for query, key and log_decay, [B, T, H, V], [B, T, H] and [B, H, K, V]; T >= 1",
            do="give one decay for each channel of the key, and one rate for each head",
        )
    dtype = compute_dtype(query.dtype)
    return query.new_zeros(shape, dtype=dtype) if memory is None else memory.to(dtype)

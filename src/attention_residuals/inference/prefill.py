"""Prefill: a prompt of any length, a chunk at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, DataError, ShapeError, is_count
from attention_residuals.inference.cache import KVCache
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Tap
from attention_residuals.models import LanguageModel

__all__ = ["Prefilled", "checked_prompt", "checked_schedule", "left_padded", "positions_of", "prefill"]


class Prefilled(NamedTuple):
    """What decoding goes on from: each sequence's next-token logits, the cache, and its real tokens.

    ``mask`` is None where no sequence is padded; then ``model(newest, cache=cache)`` goes on. Where one is
    padded, the next tokens need ``mask=cache.mask(1)`` and ``positions=positions_of(mask)[:, -1:]``.
    """

    logits: Float[Tensor, "B V"]
    cache: KVCache
    mask: Bool[Tensor, "B U"] | None


@torch.no_grad()
def prefill(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    chunk: int = 2048,
    cache: KVCache | None = None,
    residual: ResidualRule[Any] | None = None,
    tap: Callable[[], Tap] | None = None,
) -> Prefilled:
    """Reads prompts into a cache.

    Depth reads are local to a token, so sources exist for one chunk at a time: their memory does not grow
    with the text. Padding may be on the left or on the right; it is moved to the left, so that all sequences
    end together. A prompt that fails leaves the cache as it was.

    Args:
        model: Any language model.
        tokens: The prompts.
        mask: True for real tokens, in one run for each sequence.
        chunk: Tokens at once, >= 1.
        cache: An empty cache, or one that holds the texts before; then the prompts have no padding of their
            own.
        residual: Another schedule of the model's rule.
        tap: Is called for a tap before each chunk.

    Raises:
        DataError: A sequence without a real token, or with a gap; a token id out of range.
        ShapeError: More tokens than the model accepts, or tensors whose shapes do not fit.
        ConfigError: A chunk below 1, or the rule of another model.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> model, tokens = Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7, 8]])
        >>> found = prefill(model, tokens, chunk=3)
        >>> torch.allclose(found.logits, model(tokens)[:, -1], atol=1e-5), found.cache.num_tokens
        (True, 4)
    """
    cache = KVCache() if cache is None else cache
    before = cache.num_tokens
    if mask is not None:
        tokens, mask = left_padded(tokens, mask)
        mask = None if mask.all() else mask
    checked_prompt(model, tokens, before, chunk)
    checked_schedule(model, residual)
    if mask is not None and before:
        raise DataError(
            got=f"padded prompts for a cache that holds {before} tokens",
            expected="prompts of one length, or an empty cache",
            do="prefill the whole texts into a new cache",
        )
    if before and any(cache.padding):
        mask = cache.mask(tokens.shape[1])
    positions = None if mask is None else positions_of(mask)[:, before:]
    logits, held = torch.empty(0), cache.snapshot()
    try:
        for start in range(0, tokens.shape[1], chunk):
            end = min(start + chunk, tokens.shape[1])
            logits = model(
                tokens[:, start:end],
                positions=None if positions is None else positions[:, start:end],
                mask=None if mask is None else mask[:, : before + end],
                cache=cache,
                residual=residual,
                tap=None if tap is None else tap(),
                num_logits=1,
            )
    except BaseException:
        cache.restore(held)
        raise
    if mask is not None and not before:
        cache.padding = tuple((~mask).sum(1).tolist())
    return Prefilled(logits[:, -1], cache, mask)


def checked_prompt(model: LanguageModel, tokens: Tensor, num_cached: int, chunk: int) -> None:
    """Refuses a prompt that the model cannot read, before any of it is read.

    Raises:
        ShapeError: More tokens than the model accepts, or none; no batch axis.
        DataError: A token id out of range.
        ConfigError: A chunk below 1.
    """
    if not is_count(chunk):
        raise ConfigError(got=f"chunk={chunk!r}", expected="1 or more tokens", do="2048 is usual")
    _require_prompts(tokens)
    total = num_cached + tokens.shape[1]
    if not num_cached < total <= model.config.max_tokens:
        raise ShapeError(
            got=f"a prompt of {tokens.shape[1]} tokens after {num_cached}",
            expected=f"at least 1, and at most {model.config.max_tokens} in all, the model's context",
            do="cut the prompt, or use a model with a larger max_tokens",
        )
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= model.config.vocab_size:
        raise DataError(
            got=f"token ids from {low} to {high}",
            expected=f"0 to {model.config.vocab_size - 1}",
            do="encode the text with the tokenizer that the model was trained with, and pass a mask of padding",
        )


def checked_schedule(model: LanguageModel, residual: ResidualRule[Any] | None) -> None:
    """Refuses a rule that is no other schedule of the model's own: it would read with foreign parameters.

    Raises:
        ConfigError: It has other parameters.
    """
    if residual is not None and _identities(residual) != _identities(model.residual):
        raise ConfigError(
            got=f"residual=a {type(residual).__name__} with other parameters than the model's",
            expected="another schedule of the model's own rule",
            do="make it from this very model: TwoPhaseRule(model.residual)",
        )


def left_padded(
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Int[Tensor, "B U"], Bool[Tensor, "B U"]]:
    """Moves padding to the left, and drops columns in which nothing is real.

    Raises:
        DataError: A sequence without a real token, or with padding between real tokens.
        ShapeError: A mask that is not torch.bool of the tokens' shape.

    Example:
        >>> left_padded(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())[0]
        tensor([[5, 6],
                [0, 7]])
    """
    _require_prompts(tokens)
    if mask.dtype != torch.bool or mask.shape != tokens.shape:
        raise ShapeError(
            got=f"a mask {mask.dtype}{list(mask.shape)} for tokens of shape {list(tokens.shape)}",
            expected=f"torch.bool{list(tokens.shape)}, True for real tokens",
            do="pass one truth for each token, such as tokens != padding",
        )
    counts = mask.sum(1)
    if not counts.all():
        raise DataError(
            got=f"sequence {int(counts.argmin())} of {len(counts)} without a token",
            expected="at least one token in each",
            do="leave empty sequences out",
        )
    length = int(counts.max())
    moved, real = tokens.new_zeros(len(tokens), length), mask.new_zeros(len(tokens), length)
    for row, count in enumerate(counts.tolist()):
        first = int(mask[row].int().argmax())
        if not mask[row, first : first + count].all():
            raise DataError(
                got=f"padding between the tokens of sequence {row}",
                expected="padding on the left or on the right",
                do="close the gap",
            )
        moved[row, length - count :] = tokens[row, first : first + count]
        real[row, length - count :] = True
    return moved, real


def positions_of(mask: Bool[Tensor, "B U"]) -> Int[Tensor, "B U"]:
    """Numbers each sequence's real tokens from 0; padding gets 0.

    Example:
        >>> positions_of(torch.tensor([[False, True, True]]))
        tensor([[0, 0, 1]])
    """
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def _require_prompts(tokens: Tensor) -> None:
    if tokens.ndim != 2 or not len(tokens) or tokens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            got=f"tokens {tokens.dtype}{list(tokens.shape)}",
            expected="integers of shape [B, T], at least one prompt",
            do="add a batch axis: tokens[None]",
        )


def _identities(rule: ResidualRule[Any]) -> set[int]:
    return {id(parameter) for parameter in rule.parameters()}

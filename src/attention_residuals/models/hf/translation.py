"""What Transformers passes to a model, in the decoder's terms: its cache, its masks, its wish for states."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.layers.tap import OUTPUT, Chain, Pass, Read, Tap, Write
from attention_residuals.ops import weighted_sum

__all__ = ["KeptTokens", "MixedStates", "joined", "mask_and_positions"]


class KeptTokens:
    """Transformers' cache behind the interface of ours.

    Transformers counts a layer's tokens as soon as it has them, so a pass that fails leaves some behind.

    Args:
        cache: Of any kind that grows with the text; is extended.

    Raises:
        ConfigError: A cache of fixed size, or one that forgets tokens.

    Example:
        >>> from transformers import DynamicCache
        >>> kept = KeptTokens(DynamicCache())
        >>> key, value = kept.extend(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        >>> kept.advance(3)
        >>> kept.num_tokens, kept.cache.get_seq_length()
        (3, 3)
    """

    def __init__(self, cache: Cache) -> None:
        if not all(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in cache.layers):
            raise ConfigError(
                got=f"a {type(cache).__name__} of {type(cache.layers[0]).__name__}",
                expected="a cache that grows with the text and keeps all of it",
                do="pass a DynamicCache, or leave cache and cache_implementation out",
            )
        self.cache, self.num_tokens = cache, cache.get_seq_length()

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T K"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U K"]]:
        """Puts the newest tokens of a layer behind the kept ones and returns all ``U`` of them."""
        return self.cache.update(key, value, layer)

    def advance(self, num_tokens: int) -> None:
        """Counts the newest tokens, once every layer has them."""
        self.num_tokens += num_tokens


class MixedStates:
    """A tap that keeps what each layer's attention reads, before its norm, and last what the head reads.

    Where a layer reads separately for queries, keys and values, the queries' read is kept.

    Args:
        norm: Of the head.
        dtype: Of the states.
    """

    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        self.norm, self.dtype = norm, dtype
        self.found: list[Tensor] = []

    def begin(self, run: Pass) -> None:
        """Does nothing."""

    def read(self, read: Read) -> Read:
        """Keeps the mix of the first read at an attention, and that of the output."""
        if (read.site.kind == "attention" and len(self.found) == read.site.layer) or read.site == OUTPUT:
            mix = weighted_sum(read.weights, read.values).to(self.dtype)
            self.found.append(self.norm(mix) if read.site == OUTPUT else mix)
        return read

    def write(self, write: Write) -> Write:
        """Keeps nothing."""
        return write


def joined(*taps: Tap | None) -> Tap | None:
    """Makes one tap of those that there are.

    Example:
        >>> tap = MixedStates(nn.Identity(), torch.float32)
        >>> joined(None, None) is None, joined(None, tap) is tap, len(joined(tap, tap).taps)
        (True, True, 2)
    """
    given = [tap for tap in taps if tap is not None]
    return given[0] if len(given) == 1 else Chain(*given) if given else None


def mask_and_positions(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Tensor | None,
    position_ids: Int[Tensor, "_ T"] | None,
    num_cached: int,
) -> tuple[Bool[Tensor, "B U"] | Bool[Tensor, "B T T"] | None, Int[Tensor, "B T"] | None]:
    """Says who may attend to whom, and where tokens stand; None is what the decoder does by default.

    Args:
        input_ids: The new tokens.
        attention_mask: 1 for real tokens, [B, U]; U counts the cached tokens too.
        position_ids: For each sequence, or for all; by default real tokens are counted. Without a mask and
            cached tokens, positions that do not go on by 1 begin another text.
        num_cached: Tokens in the cache.

    Raises:
        ShapeError: A mask of another shape or kind.

    Example:
        >>> mask, positions = mask_and_positions(torch.zeros(1, 3).long(), torch.tensor([[0, 1, 1]]), None, 0)
        >>> mask.tolist(), positions.tolist()
        ([[False, True, True]], [[0, 0, 1]])
    """
    positions = None if position_ids is None else position_ids.expand_as(input_ids)
    if attention_mask is None:
        if positions is None or num_cached:
            return None, positions
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        text = begins.cumsum(1)
        return (text[:, :, None] == text[:, None, :] if begins.any() else None), positions
    shape = [len(input_ids), num_cached + input_ids.shape[1]]
    if list(attention_mask.shape) != shape or attention_mask.is_floating_point():
        raise ShapeError(
            got=f"an attention_mask {attention_mask.dtype}{list(attention_mask.shape)}",
            expected=f"integers or booleans of shape {shape}, the cached tokens counted too",
            do="pass what a tokenizer gives: 1 for real tokens, 0 for padding; causality is added",
        )
    mask = attention_mask.bool()
    if mask.all():
        return None, positions
    counted = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return mask, counted if positions is None else positions

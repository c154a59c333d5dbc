"""This library's cache behind the interface of Transformers'."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from attention_residuals.errors import ShapeError
from attention_residuals.layers.attention import Cache, RecurrentCache

__all__ = ["Keys"]


class Keys(TransformersCache):
    """Keeps what a model of Transformers caches in a cache of this library.

    Args:
        cache: A ``RecurrentCache`` where the model has layers of linear attention.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self._convolved: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Puts the newest tokens of a layer behind the kept ones."""
        return self.cache.extend(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Counts the kept tokens."""
        return self.cache.num_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Tells where the new tokens begin."""
        return self.cache.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tells how many keys there will be, and that the first one is number 0."""
        return self.cache.num_tokens + query_length, 0

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Returns the kept inputs of a convolution with the new ones, [B, C, U], and keeps the newest."""
        before = self._recall(layer_idx)
        if before is not None and len(before[0]) != len(conv_states):
            raise ShapeError(
                got=f"a batch of {len(conv_states)} for a cache of {len(before[0])}",
                expected="the same sequences in every pass",
                do="make a new cache for other sequences",
            )
        seen = conv_states if before is None else torch.cat([before[0], conv_states], -1)
        size: int = kwargs["conv_kernel_size"]
        newest = seen[..., -size:]
        # Padding copies, also by 0: a view would keep all inputs of the pass.
        self._convolved[layer_idx] = torch.nn.functional.pad(newest, (size - newest.shape[-1], 0))
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the memory of the kept tokens."""
        before = self._recall(layer_idx)
        return None if before is None else before[1]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keeps the memory after the new tokens."""
        assert isinstance(self.cache, RecurrentCache)
        self.cache.remember(layer_idx, self._convolved.pop(layer_idx), recurrent_states)
        return recurrent_states

    def _recall(self, layer: int) -> tuple[Tensor, ...] | None:
        assert isinstance(self.cache, RecurrentCache)
        return self.cache.recall(layer)

"""Keys and values of earlier tokens, so that a new token costs one token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ShapeError

__all__ = ["KVCache"]


class KVCache:
    """Keeps every layer's keys and values in buffers that grow by doubling.

    For inference: what is stored carries no gradient.

    Example:
        >>> import torch
        >>> from attention_residuals.models import Decoder, presets
        >>> model, cache = Decoder(presets.scaled(2, vocab_size=300)), KVCache()
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> with torch.no_grad():
        ...     first, rest = model(tokens[:, :2], cache=cache), model(tokens[:, 2:], cache=cache)
        >>> torch.allclose(rest[:, 0], model(tokens)[:, 2], atol=1e-5)
        True
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept."""
        return self._num_tokens

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T K"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U K"]]:
        """Puts the newest tokens of a layer behind the kept ones and returns all ``U`` of them.

        Raises:
            ShapeError: Another batch size than that of the kept tokens.
        """
        return self._put(self._keys, layer, key.detach()), self._put(self._values, layer, value.detach())

    def advance(self, num_tokens: int) -> None:
        """Keeps the newest tokens, once every layer has them."""
        self._num_tokens += num_tokens

    def keep(self, rows: Sequence[int], *, start: int = 0) -> None:
        """Keeps some sequences, in the order given, and of them the tokens from ``start`` on."""
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[list(rows), :, start : self._num_tokens]
        self._num_tokens -= start

    def join(self, other: "KVCache") -> None:
        """Adds the sequences of another cache, both aligned at their newest tokens.

        The shorter ones get zeros before their first token, which a mask must leave out.
        """
        total = max(self._num_tokens, other._num_tokens)
        for own, more in ((self._keys, other._keys), (self._values, other._values)):
            for layer, added in more.items():
                parts = [_aligned(added, other._num_tokens, total)]
                if self._num_tokens:
                    parts.insert(0, _aligned(own[layer], self._num_tokens, total))
                own[layer] = torch.cat(parts)
        self._num_tokens = total

    def _put(self, buffers: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        batch, heads, length, width = new.shape
        total, buffer = self._num_tokens + length, buffers.get(layer)
        if buffer is not None and self._num_tokens and buffer.shape[0] != batch:
            raise ShapeError(
                got=f"a batch of {batch} for a cache of {buffer.shape[0]}",
                expected="the same sequences in every pass",
                do="make a new cache for other sequences",
            )
        if buffer is None or buffer.shape[0] != batch or buffer.shape[2] < total:
            grown = new.new_empty(batch, heads, max(total, 2 * self._num_tokens), width)
            if buffer is not None and self._num_tokens:
                grown[:, :, : self._num_tokens] = buffer[:, :, : self._num_tokens]
            buffers[layer] = buffer = grown
        buffer[:, :, self._num_tokens : total] = new
        return buffer[:, :, :total]


def _aligned(buffer: Tensor, num_tokens: int, total: int) -> Tensor:
    """Returns the kept tokens behind enough zeros."""
    return torch.nn.functional.pad(buffer[:, :, :num_tokens], (0, 0, total - num_tokens, 0))

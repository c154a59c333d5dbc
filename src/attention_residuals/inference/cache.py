"""Keys, values and states of earlier tokens, so that a new token costs one token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_residuals.errors import ConfigError, ShapeError

__all__ = ["KVCache", "Snapshot"]


class Snapshot(NamedTuple):
    """What a cache goes back to."""

    num_tokens: int
    states: dict[int, tuple[Tensor, ...]]


class KVCache:
    """Keeps every layer's keys and values in buffers that grow by doubling, and states of linear attention.

    For inference only: what is stored carries no gradient, so a pass that asks for one is refused.

    Sequences of different length end together, and the places before the first token of a shorter one are
    padding. A model does not know of it: to go on by hand from a cache with padding, pass
    ``mask=cache.mask(1)`` and ``positions=positions_of(mask)[:, -1:]`` with the next tokens. ``prefill`` and
    ``Engine`` do so by themselves.

    Attributes:
        padding: How many places before each sequence's first token are padding. ``prefill``, ``join`` and
            ``keep`` count them; whoever fills a cache with a mask of their own sets it.

    Example:
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
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._newest: dict[int, tuple[Tensor, ...]] = {}
        self._num_tokens = 0
        self.padding: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept, padding included."""
        return self._num_tokens

    def mask(self, num_new: int = 0) -> Bool[Tensor, "B U"]:
        """Makes the mask of a pass over the next tokens: False for padding, True for all other tokens.

        Args:
            num_new: Tokens of the pass, which count as real.
        """
        kept = (*self._keys.values(), *(state[0] for state in self._states.values()))
        device = next((buffer.device for buffer in kept), None)
        places = torch.arange(self._num_tokens + num_new, device=device)
        return places >= torch.tensor(self.padding, dtype=torch.long, device=device)[:, None]

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T _"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U _"]]:
        """Puts the newest tokens of a layer behind the kept ones and returns all ``U`` of them.

        Raises:
            ShapeError: Another batch size than that of the kept tokens.
            ConfigError: Keys or values that require a gradient, which would be lost.
        """
        self._require(key, value)
        return self._put(self._keys, layer, key), self._put(self._values, layer, value)

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        """Returns what ``remember`` kept of a layer after the kept tokens, or None before the first."""
        return self._states.get(layer) if self._num_tokens else None

    def remember(self, layer: int, *state: Tensor) -> None:
        """Keeps a layer's state after the newest tokens, its first axis the batch; holds from ``advance`` on.

        Raises:
            ShapeError: Another batch size than that of the kept tokens.
            ConfigError: A state that requires a gradient, which would be lost.
        """
        self._require(*state)
        self._newest[layer] = state

    def advance(self, num_tokens: int) -> None:
        """Keeps the newest tokens and states, once every layer has them."""
        self._num_tokens += num_tokens
        self._states |= self._newest
        self._newest = {}

    def snapshot(self) -> Snapshot:
        """Says what is kept, for ``restore``."""
        return Snapshot(self._num_tokens, dict(self._states))

    def restore(self, snapshot: Snapshot) -> None:
        """Lets go of the tokens that came after a snapshot of this very cache."""
        self._num_tokens, self._states, self._newest = snapshot.num_tokens, dict(snapshot.states), {}

    def keep(self, rows: Sequence[int], *, start: int = 0) -> None:
        """Keeps some sequences, in the order given, and of them the tokens from ``start`` on.

        States that sum all tokens up, as linear attention keeps, still hold those before ``start``: with such
        layers, only padding can be cut.

        Raises:
            ShapeError: A sequence or a start that is not there.
        """
        if not all(0 <= row < len(self.padding) for row in rows) or not 0 <= start <= self._num_tokens:
            raise ShapeError(
                got=f"rows {list(rows)} from token {start} on",
                expected=f"some of {len(self.padding)} sequences, from 0 to {self._num_tokens} on",
                do="count sequences and tokens from 0",
            )
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer[list(rows), :, start : self._num_tokens]
        self._states = {
            layer: tuple(tensor[list(rows)] for tensor in state) for layer, state in self._states.items()
        }
        self._num_tokens -= start
        self.padding = tuple(max(0, self.padding[row] - start) for row in rows)

    def join(self, other: "KVCache") -> None:
        """Adds the sequences of another cache, all aligned at their newest tokens.

        The shorter ones get padding before their first token: from here on each pass needs ``mask(1)`` and
        positions, as the class says.

        Raises:
            ShapeError: A cache of another model.
        """
        if not other._num_tokens:
            return
        if not self._num_tokens:
            self._keys, self._values, self._states, self.padding = {}, {}, {}, ()
        own_kind, kind = _kind(self._keys), _kind(other._keys)
        if own_kind and own_kind != kind:
            raise ShapeError(
                got=f"a cache of {_in_words(kind)}",
                expected=f"one of {_in_words(own_kind)}, as the cache that it joins",
                do="join caches of one model",
            )
        total = max(self._num_tokens, other._num_tokens)
        for own, more in ((self._keys, other._keys), (self._values, other._values)):
            for layer, added in more.items():
                parts = [_aligned(added, other._num_tokens, total)]
                if self._num_tokens:
                    parts.insert(0, _aligned(own[layer], self._num_tokens, total))
                own[layer] = torch.cat(parts)
        self._states = {
            layer: tuple(torch.cat(parts) for parts in zip(self._states[layer], added, strict=True))
            if layer in self._states
            else added
            for layer, added in other._states.items()
        }
        self.padding = tuple(
            count + total - cache._num_tokens for cache in (self, other) for count in cache.padding
        )
        self._num_tokens = total

    def _require(self, *new: Tensor) -> None:
        """Refuses what cannot be kept; the first tokens decide how many sequences there are."""
        if any(tensor.requires_grad for tensor in new):
            raise ConfigError(
                got="keys, values or states that require a gradient, and a cache",
                expected="a pass without gradients: what is cached carries none",
                do="run it under torch.no_grad(), or without a cache",
            )
        batch = len(new[0])
        if not self._num_tokens:
            self.padding = (0,) * batch
        elif batch != len(self.padding):
            raise ShapeError(
                got=f"a batch of {batch} for a cache of {len(self.padding)}",
                expected="the same sequences in every pass",
                do="make a new cache for other sequences",
            )

    def _put(self, buffers: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        batch, heads, length, width = new.shape
        total, buffer = self._num_tokens + length, buffers.get(layer)
        if buffer is None or buffer.shape[0] != batch or buffer.shape[2] < total or not _writable(buffer):
            grown = new.new_empty(batch, heads, max(total, 2 * self._num_tokens), width)
            if buffer is not None and self._num_tokens:
                grown[:, :, : self._num_tokens] = buffer[:, :, : self._num_tokens]
            buffers[layer] = buffer = grown
        buffer[:, :, self._num_tokens : total] = new
        return buffer[:, :, :total]


def _writable(buffer: Tensor) -> bool:
    """Tells a buffer that was made in ``torch.inference_mode`` and may not be written to outside of it."""
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _kind(keys: dict[int, Tensor]) -> dict[int, tuple[object, ...]]:
    """Says of each layer what the caches of one model have in common."""
    return {
        layer: (buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device)
        for layer, buffer in sorted(keys.items())
    }


def _in_words(kind: dict[int, tuple[object, ...]]) -> str:
    heads, width, dtype, device = next(iter(kind.values()))
    return f"{len(kind)} layers with {heads} heads of width {width} in {dtype} on {device}"


def _aligned(buffer: Tensor, num_tokens: int, total: int) -> Tensor:
    """Returns the kept tokens behind enough zeros."""
    return torch.nn.functional.pad(buffer[:, :, :num_tokens], (0, 0, total - num_tokens, 0))

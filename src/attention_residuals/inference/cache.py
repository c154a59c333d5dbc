"""Keys and values of earlier tokens, so that a new token costs one token."""

from jaxtyping import Float
from torch import Tensor

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
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths: list[int] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept."""
        return self._lengths[-1] if self._lengths else 0

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T K"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U K"]]:
        """Adds the newest tokens of a layer and returns all ``U`` tokens of that layer; layers come in order."""
        if layer == len(self._keys):
            self._keys.append(key.detach())
            self._values.append(value.detach())
            self._lengths.append(key.shape[2])
            return key, value
        kept, total = self._lengths[layer], self._lengths[layer] + key.shape[2]
        for buffers, new in ((self._keys, key), (self._values, value)):
            if buffers[layer].shape[2] < total:
                batch, heads, _, width = new.shape
                grown = new.new_empty(batch, heads, max(total, 2 * buffers[layer].shape[2]), width)
                grown[:, :, :kept] = buffers[layer][:, :, :kept]
                buffers[layer] = grown
            buffers[layer][:, :, kept:total] = new.detach()
        self._lengths[layer] = total
        return self._keys[layer][:, :, :total], self._values[layer][:, :, :total]

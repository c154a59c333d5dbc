"""Causal grouped-query self-attention, with its own norm."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from attention_residuals.layers.norm import RMSNorm
from attention_residuals.layers.rope import Rotation, rotate

__all__ = ["Attention", "AttentionContext", "Cache", "RecurrentCache", "allowed_pairs"]


@runtime_checkable
class Cache(Protocol):
    """Keeps the keys and values of earlier tokens, a layer at a time."""

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept."""
        ...

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T _"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U _"]]:
        """Puts the newest tokens of a layer behind the kept ones and returns all ``U`` of them."""
        ...

    def advance(self, num_tokens: int) -> None:
        """Keeps the newest tokens, once every layer has them; a pass that failed before leaves no trace."""
        ...


@runtime_checkable
class RecurrentCache(Cache, Protocol):
    """Keeps what layers of linear attention go on from, too: tensors that do not grow with the text."""

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        """Returns a layer's state after the kept tokens, or None before the first."""
        ...

    def remember(self, layer: int, *state: Tensor) -> None:
        """Keeps a layer's state after the newest tokens, its first axis the batch; holds from ``advance`` on."""
        ...


class AttentionContext(NamedTuple):
    """What every attention of one forward pass shares."""

    rotation: Rotation
    allowed: Bool[Tensor, "B 1 T U"] | None = None
    """Which keys each query may attend to; None means: itself and everything before it."""
    cache: Cache | None = None


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries; no biases.

    ``norm`` belongs to the reader: whoever calls this module passes normalised inputs.

    Args:
        width: Model width D.
        num_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        head_width: K, even.
        layer: This layer's number, which a cache needs.
        norm_eps: The eps of ``norm``.

    Source:
        Vaswani et al., arXiv:1706.03762; Ainslie et al. (grouped queries), arXiv:2305.13245.
    """

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, head_width: int, *, layer: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.layer, self.head_width = layer, head_width
        self.norm = RMSNorm(width, norm_eps)
        self.query = nn.Linear(width, num_heads * head_width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * head_width, bias=False)
        self.output = nn.Linear(num_heads * head_width, width, bias=False)

    def forward(
        self,
        q_input: Float[Tensor, "B T D"],
        k_input: Float[Tensor, "B T D"] | None = None,
        v_input: Float[Tensor, "B T D"] | None = None,
        *,
        context: AttentionContext,
    ) -> Float[Tensor, "B T D"]:
        """Attends; keys and values come from ``q_input`` unless a rule reads separately for them."""
        query = self._heads(self.query(q_input))
        key = self._heads(self.key(q_input if k_input is None else k_input))
        value = self._heads(self.value(q_input if v_input is None else v_input))
        query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if context.cache is not None:
            key, value = context.cache.extend(self.layer, key, value)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=context.allowed,
            is_causal=context.allowed is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected_BTHK: Tensor) -> Float[Tensor, "B H T K"]:
        return projected_BTHK.view(*projected_BTHK.shape[:-1], -1, self.head_width).transpose(1, 2)


def allowed_pairs(
    mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None,
    num_tokens: int,
    num_cached: int,
    device: torch.device | None = None,
) -> Bool[Tensor, "B 1 T U"] | None:
    """Combines causality with a mask of real tokens or of allowed pairs; None where plain causality does.

    A query that may attend to nothing (a padding token) attends to itself, so that no NaN arises; its
    output means nothing.

    Args:
        mask: True for real tokens, [B, U], or for allowed (query, key) pairs, [B, T, U]; U counts the
            cached tokens too.
        num_tokens: T, the new tokens.
        num_cached: Tokens already in the cache.
        device: Of the result.

    Example:
        >>> allowed_pairs(torch.tensor([[False, True, True]]), 3, 0)[0, 0].int()
        tensor([[1, 0, 0],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    if mask is None and num_cached == 0:
        return None
    total = num_cached + num_tokens
    query_position = torch.arange(num_cached, total, device=device)[:, None]
    key_position = torch.arange(total, device=device)[None, :]
    causal = key_position <= query_position
    if mask is None:
        return causal[None, None]
    pairs = mask[:, None, :] if mask.ndim == 2 else mask
    return ((pairs & causal) | (key_position == query_position)).unsqueeze(1)

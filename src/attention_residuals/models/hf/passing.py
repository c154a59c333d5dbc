"""What a converted model is handed in a pass: which masks its layers know, and what else its forward accepts."""

import inspect
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from attention_residuals.errors import ConfigError
from attention_residuals.layers.attention import Cache, RecurrentCache, allowed_pairs
from attention_residuals.models.hf.keys import Keys
from attention_residuals.models.hf.kimi_linear import ChunkedDeltaAttention, documents_of

__all__ = ["Passing"]


class Passing:
    """Makes the arguments of a converted model's passes; a part of the model is given the same ones.

    Args:
        model: The whole one, which it does not keep.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.is_recurrent = any(isinstance(module, ChunkedDeltaAttention) for module in model.modules())
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        self._name = type(model).__name__

    def arguments(
        self,
        positions: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None,
        dtype: torch.dtype,
        *,
        cache: Cache | None = None,
        num_logits: int | None = None,
    ) -> dict[str, Any]:
        """Returns what a pass is given beside its tokens.

        Args:
            positions: Of the tokens.
            mask: As for ``LanguageModel.forward``.
            dtype: Of the model.
            cache: As for ``LanguageModel.forward``.
            num_logits: As for ``LanguageModel.forward``.

        Raises:
            ConfigError: A cache for a model with other than attention layers, or a mask of pairs for one
                whose layers do not all see the same.
        """
        self._require_possible(mask, cache)
        num_cached = 0 if cache is None else cache.num_tokens
        given = {
            "attention_mask": self._attention_mask(mask, positions.shape[1], num_cached, dtype),
            "position_ids": positions,
            "cache": None if cache is None else Keys(cache),
            "use_cache": cache is not None,
            **({} if num_logits is None else {"logits_to_keep": num_logits}),
        }
        return {name: value for name, value in given.items() if name in self._accepted}

    def _attention_mask(
        self, mask: Tensor | None, num_tokens: int, num_cached: int, dtype: torch.dtype
    ) -> Any:
        if mask is None:
            return None
        if mask.ndim == 2 and not self.is_recurrent:
            return mask.long()
        allowed = allowed_pairs(mask, num_tokens, num_cached, mask.device)
        assert allowed is not None
        added = torch.zeros(allowed.shape, dtype=dtype, device=mask.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )
        if not self.is_recurrent:
            return added
        return {"full_attention": added, "linear_attention": documents_of(mask, num_tokens)}

    def _require_possible(self, mask: Tensor | None, cache: Cache | None) -> None:
        recurrent = {"linear_attention"} if self.is_recurrent else set()
        held = recurrent if isinstance(cache, RecurrentCache) else set()
        if cache is not None and self._layer_types - {"full_attention", "sliding_attention"} - held:
            raise ConfigError(
                got=f"a {type(cache).__name__} for layers of {', '.join(sorted(self._layer_types))}",
                expected="attention layers, or Kimi Linear and a KVCache",
                do="use a KVCache, or model.transformers.generate, whose cache holds any state",
            )
        bound = self._layer_types - {"full_attention"} - recurrent or {"position_ids"} - self._accepted
        if mask is not None and mask.ndim == 3 and bound:
            raise ConfigError(
                got=f"a mask of pairs for a {self._name}",
                expected="a model all of whose layers see the whole text, at positions that it is told",
                do="train and evaluate with cross_documents=True, or mask whole tokens",
            )

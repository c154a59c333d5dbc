"""What every language model of this library is: a config that makes it, and one forward pass."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attention_residuals.errors import DataError, ShapeError, is_count
from attention_residuals.layers.attention import Cache
from attention_residuals.layers.residual import ResidualConfig, ResidualRule
from attention_residuals.layers.tap import Tap

__all__ = ["LanguageModel", "ModelConfig", "RouterShape", "checked_positions"]


@runtime_checkable
class ModelConfig(Protocol):
    """The shape of a language model and its residual rule; a frozen dataclass that JSON can hold."""

    @property
    def vocab_size(self) -> int:
        """V, tokens in the vocabulary."""
        ...

    @property
    def num_layers(self) -> int:
        """L, each an attention and an MLP."""
        ...

    @property
    def width(self) -> int:
        """D."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model accepts."""
        ...

    @property
    def residual(self) -> ResidualConfig:
        """The residual rule with its options."""
        ...


class RouterShape(NamedTuple):
    """How many experts a sublayer has, and how many of them each token is sent to."""

    num_experts: int
    num_active: int


class LanguageModel(nn.Module, ABC):
    """A causal language model around a residual rule; ``Decoder``, ``ConvertedModel`` and ``Inkling2Model`` are there.

    ``config`` says what it is, and ``residual`` is its rule.
    """

    config: Any
    residual: ResidualRule[Any]

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        residual: ResidualRule[Any] | None = None,
        num_logits: int | None = None,
    ) -> Float[Tensor, "B _ V"]:
        """Computes the logits of every next token.

        Args:
            tokens: Ids, 0 to vocab_size - 1.
            positions: Absolute positions; by default they go on from the cache.
            mask: True for real tokens [B, U], or for the (query, key) pairs that may attend [B, T, U];
                causality is added. U counts the cached tokens too.
            cache: Keys and values of earlier tokens; is extended.
            tap: Sees and may change every depth read and every write.
            residual: Runs in place of the model's own rule: another schedule of it with the same parameters.
            num_logits: Compute those of the last so many tokens only, 1 or more; by default of all.

        Raises:
            DataError: A token id out of range.
            ShapeError: A sequence longer than the model's, or shapes that do not fit.
        """

    @abstractmethod
    def unembed(self, state: Float[Tensor, "*BT D"]) -> Float[Tensor, "*BT V"]:
        """Makes logits of a state as the output read's is made into logits: the last norm, then the head."""

    @property
    def sublayer_kinds(self) -> dict[str, str]:
        """What each sublayer is, by writer, where they differ: KDA, MLA, MLP or MoE."""
        return {}

    @property
    def routers(self) -> dict[str, RouterShape]:
        """The sublayers that choose experts, by writer."""
        return {}

    def settle(self) -> None:
        """Is called after each optimizer step; a model with experts balances their load."""


def checked_positions(
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    num_cached: int,
    num_logits: int | None,
) -> Int[Tensor, "B T"]:
    """Checks what a forward pass was given, and returns the positions of its tokens.

    Raises:
        DataError: A token id out of range.
        ShapeError: A sequence longer than the model's, or shapes that do not fit.
    """
    if num_logits is not None and not is_count(num_logits):
        raise ShapeError(
            got=f"num_logits={num_logits!r}", expected="1 or more, or None", do="None computes all logits"
        )
    if tokens.ndim != 2 or not tokens.numel() or tokens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            got=f"tokens {tokens.dtype}{list(tokens.shape)}",
            expected="integers of shape [B, T], at least one",
            do="add a batch axis: tokens[None]"
            if tokens.ndim == 1
            else "give at least one token, as integers: tokens.long()",
        )
    batch, length = tokens.shape
    total = num_cached + length
    if total > config.max_tokens:
        raise ShapeError(
            got=f"a sequence of {total} tokens",
            expected=f"at most {config.max_tokens}, the model's max_tokens",
            do="cut the text, or make a model with a larger max_tokens",
        )
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= config.vocab_size:
            raise DataError(
                got=f"token ids from {low} to {high}",
                expected=f"0 to {config.vocab_size - 1}",
                do="encode the text with the tokenizer that the model was trained with",
            )
    if mask is not None and mask.dtype != torch.bool:
        raise ShapeError(
            got=f"a mask of {mask.dtype}",
            expected="torch.bool, True for real tokens",
            do="pass mask.bool()",
        )
    if mask is not None and tuple(mask.shape) not in ((batch, total), (batch, length, total)):
        raise ShapeError(
            got=f"a mask of shape {list(mask.shape)}",
            expected=f"[{batch}, {total}] or [{batch}, {length}, {total}]",
            do="count the cached tokens too",
        )
    if positions is None:
        positions = torch.arange(num_cached, total, device=tokens.device).expand(batch, length)
    if positions.shape != tokens.shape:
        raise ShapeError(
            got=f"positions of shape {list(positions.shape)}",
            expected=f"{list(tokens.shape)}, one for each token",
            do="expand them over the batch",
        )
    return positions

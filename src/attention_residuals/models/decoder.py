"""The decoder language model: a visible loop of read, sublayer, write."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_residuals.layers.attention import Attention, AttentionContext, Cache, allowed_pairs
from attention_residuals.layers.mlp import MLP
from attention_residuals.layers.norm import RMSNorm
from attention_residuals.layers.residual import ResidualRule, checked_inputs
from attention_residuals.layers.rope import rotation
from attention_residuals.layers.tap import OUTPUT, Pass, Site, Tap
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.language_model import LanguageModel, checked_positions

__all__ = ["Decoder", "Layer"]


class Layer(nn.Module):
    """One attention and one MLP; how they are joined is the residual rule's business."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.attention = Attention(
            config.width,
            config.num_heads,
            config.num_kv_heads,
            config.head_width,
            layer=number,
            norm_eps=config.norm_eps,
        )
        self.mlp = MLP(config.width, config.mlp_width, norm_eps=config.norm_eps)

    def sublayers(self) -> Iterator[tuple[Site, Attention | MLP]]:
        """Yields both sublayers in order, each with the site where its read happens."""
        yield Site(self.number, "attention"), self.attention
        yield Site(self.number, "mlp"), self.mlp


class Decoder(LanguageModel):
    """A pre-norm causal language model whose residual connections are a rule of your choice.

    Models of the same shape and seed start with the same shared weights whatever their rule, and with
    attention residuals (pseudo-queries zero) compute the same function as the standard model, up to the
    norms' eps.

    Args:
        config: The model's shape and residual rule.
        checkpoint_activations: Keep only the residual state between layers for backward and compute the
            rest again, depth reads included. Under a tap, reads and writes happen once and only the
            insides of sublayers are computed again.

    Example:
        >>> from attention_residuals.models import presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> model(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 300])
    """

    def __init__(self, config: DecoderConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()
        # Last, so that a rule that draws its own start leaves the other weights what they are.
        self.residual: ResidualRule[Any] = config.residual.build(
            num_layers=config.num_layers, width=config.width
        )

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
        """Computes the logits of every next token; see ``LanguageModel.forward``."""
        num_cached = 0 if cache is None else cache.num_tokens
        positions = checked_positions(self.config, tokens, positions, mask, num_cached, num_logits)
        if tap is not None:
            tap.begin(Pass(tokens, positions, mask))
        embedded = self.embedding(tokens)
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)
        context = AttentionContext(
            rotation(positions, self.config.head_width, self.config.rope_base, dtype),
            allowed_pairs(mask, tokens.shape[1], num_cached, tokens.device),
            cache,
        )
        saving = self.checkpoint_activations and torch.is_grad_enabled() and cache is None

        rule = self.residual if residual is None else residual
        state = rule.open(embedded, tap)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if saving and tap is None:
                state = _recomputed(self._run_layer, rule, state, layer, context)
            else:
                state = self._run_layer(rule, state, layer, context, tap, saving=saving)
        inputs, _ = rule.read(state, OUTPUT, self.norm, tap)
        if cache is not None:
            cache.advance(tokens.shape[1])
        output = inputs[0] if num_logits is None else inputs[0][:, -num_logits:]
        return self._head(output)

    def unembed(self, state: Float[Tensor, "*BT D"]) -> Float[Tensor, "*BT V"]:
        """Makes logits of a state: the last norm, then the head."""
        return self._head(self.norm(state))

    def _head(self, output: Tensor) -> Tensor:
        logits: Tensor = F.linear(output, self.embedding.weight) if self.head is None else self.head(output)
        return logits

    def _run_layer(
        self,
        rule: ResidualRule[Any],
        state: Any,
        layer: Layer,
        context: AttentionContext,
        tap: Tap | None = None,
        saving: bool = False,
    ) -> Any:
        for site, sublayer in layer.sublayers():
            inputs, state = rule.read(state, site, sublayer.norm, tap)
            run = partial(_recomputed, sublayer) if saving else sublayer
            inputs = checked_inputs(inputs, sublayer, site)
            state = rule.write(state, site, run(*inputs, context=context), tap)
        return state

    def _initialise(self) -> None:
        """Normal weights of ``init_std``; what writes to the residual state is smaller by sqrt(2 L)."""
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.num_layers) if writes else std)
        if self.config.common_std:
            with torch.no_grad():
                self.embedding.weight += self.config.common_std * torch.randn(self.config.width)


def _recomputed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a function whose insides are dropped and computed again in backward; there is no dropout."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

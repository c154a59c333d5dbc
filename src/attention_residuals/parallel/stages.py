"""Cuts a model into stages: each is a part of the same loop, with the same names of parameters."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_residuals.errors import ConfigError
from attention_residuals.layers.attention import AttentionContext, allowed_pairs
from attention_residuals.layers.residual import (
    ResidualRule,
    SourceRule,
    SourceState,
    StandardRule,
    StandardState,
    checked_inputs,
)
from attention_residuals.layers.residual.sources import read_often, reader_name
from attention_residuals.layers.rope import rotation
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models import Decoder, LanguageModel, Layer
from attention_residuals.models.language_model import checked_positions
from attention_residuals.parallel.plan import Placement, StageLayout

__all__ = ["DecoderStage", "Stage", "cut", "dtype_of_pieces", "layout_of", "shallow"]

M = TypeVar("M", bound=nn.Module)


class Stage(nn.Module, ABC):
    """Some consecutive layers of a model: the first stage begins with its embedding, the last ends with its head.

    It shares the model's modules and keeps their names, so that the parameters of all stages together are
    those of the model. It knows nothing of processes.

    Args:
        model: The whole model.
        first: The first layer of the stage.
        end: The one behind its last.
        is_tied: The head is the embedding.
    """

    def __init__(self, model: LanguageModel, first: int, end: int, *, is_tied: bool) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = first == 0, end == model.config.num_layers
        self.is_tied = is_tied
        self.numbers = range(first, end)
        """Of its layers, in the model."""
        sites = [Site(layer, kind) for layer in range(first, end) for kind in ("attention", "mlp")]
        self.residual = _rule_of_sites(model.residual, [*sites, *([OUTPUT] if self.is_last else [])])

    @abstractmethod
    def table(self) -> nn.Module | None:
        """Returns the embedding, where the stage has it: at the start, or as a tied head."""

    @abstractmethod
    def run(
        self, given: Tensor, state: Any, positions: Int[Tensor, "B T"], mask: Bool[Tensor, "B ..."] | None
    ) -> Any:
        """Returns the rule's state behind the stage, or the logits of the last one.

        Args:
            given: Tokens for the first stage; for others a piece of the state.
            state: Of the rule; None for the first stage.
            positions: Of the tokens.
            mask: As for the whole model.
        """

    def forward(
        self,
        *state: Tensor,
        positions: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B U"] | Bool[Tensor, "B T U"] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Computes the state that the next stage starts with.

        Args:
            state: Tokens [B, T] for the first stage; for others the pieces of the state [B, T, D], in the
                order of ``StageLayout.state_after``.
            positions: As for the whole model.
            mask: As for the whole model.

        Returns:
            The pieces of the state, or the logits [B, T, V] of the last stage.
        """
        if self.is_first:
            positions = checked_positions(self.config, state[0], positions, mask, 0, None)
        elif positions is None:
            positions = torch.arange(state[0].shape[1], device=state[0].device).expand(state[0].shape[:2])
        found = self.run(state[0], None if self.is_first else self._state_of(state), positions, mask)
        if self.is_last:
            logits: Tensor = found
            return logits
        return tuple(found.blocks + found.open_block) if isinstance(found, SourceState) else tuple(found)

    def _state_of(self, pieces: tuple[Tensor, ...]) -> Any:
        """Makes the rule's state of the pieces that came from earlier stages."""
        if isinstance(self.residual, StandardRule):
            return StandardState(*pieces)
        assert isinstance(self.residual, SourceRule)
        finished = 1 + 2 * self.numbers.start // self.residual.config.sublayers_per_block
        return SourceState(tuple(read_often(piece, None) for piece in pieces[:finished]), pieces[finished:])


class DecoderStage(Stage):
    """A stage of a decoder of this package.

    Args:
        model: As for ``Stage``.
        first: As for ``Stage``.
        end: As for ``Stage``.
    """

    def __init__(self, model: Decoder, first: int, end: int) -> None:
        super().__init__(model, first, end, is_tied=model.config.tied)
        self.checkpoint_activations = model.checkpoint_activations
        self.embedding = model.embedding if self.is_first or (self.is_last and self.is_tied) else None
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in range(first, end)})
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None

    def table(self) -> nn.Module | None:
        """Returns the embedding, where the stage has it."""
        return self.embedding

    def run(
        self, given: Tensor, state: Any, positions: Int[Tensor, "B T"], mask: Bool[Tensor, "B ..."] | None
    ) -> Any:
        """Runs the layers one after the other, as the decoder's own loop does."""
        if self.is_first:
            assert self.embedding is not None
            state = self.residual.open(self.embedding(given))
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        context = AttentionContext(
            rotation(positions, self.config.head_width, self.config.rope_base, dtype),
            allowed_pairs(mask, given.shape[1], 0, given.device),
        )
        for layer in self.layers.values():
            if self.checkpoint_activations and torch.is_grad_enabled():
                state = checkpoint(
                    self._run_layer, state, layer, context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                state = self._run_layer(state, layer, context)
        if self.norm is None:
            return state
        inputs, _ = self.residual.read(state, OUTPUT, self.norm)
        if self.head is not None:
            return self.head(inputs[0])
        assert self.embedding is not None
        return F.linear(inputs[0], self.embedding.weight)

    def _run_layer(self, state: Any, layer: nn.Module, context: AttentionContext) -> Any:
        assert isinstance(layer, Layer)
        for site, sublayer in layer.sublayers():
            inputs, state = self.residual.read(state, site, sublayer.norm)
            inputs = checked_inputs(inputs, sublayer, site)
            state = self.residual.write(state, site, sublayer(*inputs, context=context))
        return state


def cut(model: LanguageModel, layers: Sequence[int]) -> tuple[Stage, ...]:
    """Cuts a model into stages that share its modules.

    Args:
        model: A decoder, or a converted model whose parameters are those of its layers and ends, with the
            standard residual or a rule that keeps sources as ``AttnRes`` does.
        layers: How many layers each stage has; ``even_layers`` spreads them.

    Raises:
        ConfigError: The layers are not those of the model, its rule carries another state, or it has
            parameters of its own before the first layer or behind the last.

    Example:
        >>> from attention_residuals.models import presets
        >>> model = Decoder(presets.scaled(4, vocab_size=300))
        >>> first, last = cut(model, (1, 3))
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> torch.equal(last(*first(tokens)), model(tokens))
        True
    """
    layout_of(model, layers, num_ranks=1)
    ends = [sum(layers[: number + 1]) for number in range(len(layers))]
    kind = _kind_of_stage(model)
    return tuple(kind(model, first, end) for first, end in zip([0, *ends], ends, strict=False))


def layout_of(
    model: LanguageModel, layers: Sequence[int], *, num_ranks: int, placement: Placement = "loop"
) -> StageLayout:
    """Describes the stages of a model for ``plan``.

    Raises:
        ConfigError: As ``cut``, or the stages cannot be placed so.

    Example:
        >>> from attention_residuals.models import presets
        >>> layout_of(Decoder(presets.scaled(4, vocab_size=300)), (1, 3), num_ranks=2).sublayers
        (2, 6)
    """
    _kind_of_stage(model)
    if sum(layers) != model.config.num_layers or min(layers, default=0) < 1:
        raise ConfigError(
            got=f"stages of {tuple(layers)} layers for a model of {model.config.num_layers}",
            expected="every layer in one stage, and at least one in each",
            do="use even_layers(num_layers, num_stages)",
        )
    return StageLayout(
        sublayers=tuple(2 * number for number in layers),
        num_ranks=num_ranks,
        placement=placement,
        sublayers_per_block=_block_size(model.residual),
    )


def dtype_of_pieces(model: LanguageModel) -> torch.dtype:
    """Returns the dtype that a model's rule keeps its state in."""
    # The first parameter is the embedding, or the rule's own, which has the same dtype.
    like = next(model.parameters()).new_zeros(1, 1, model.config.width)
    with torch.no_grad():
        state = model.residual.open(like)
    found: torch.dtype = state[0].dtype if isinstance(state[0], Tensor) else state[0][0].dtype
    return found


def _kind_of_stage(model: LanguageModel) -> Callable[[Any, int, int], Stage]:
    """Returns what makes stages of a model, if anything does."""
    if isinstance(model, Decoder):
        return DecoderStage
    # Transformers takes seconds to import, and who has such a model has imported it.
    from attention_residuals.models.hf.converted_model import ConvertedModel
    from attention_residuals.parallel.converted_stage import ConvertedStage, require_cuttable

    if not isinstance(model, ConvertedModel):
        raise ConfigError(
            got=f"stages of a {type(model).__name__}",
            expected="a Decoder, or a ConvertedModel: ConvertedModel(convert(model, ...))",
            do="wrap what convert returned, or train it in one process",
        )
    require_cuttable(model)
    return ConvertedStage


def _block_size(rule: ResidualRule[Any]) -> int | None:
    """Returns how many sublayers a piece of the rule's state sums; None where the stream is all there is."""
    if isinstance(rule, StandardRule):
        return None
    if (
        isinstance(rule, SourceRule)
        and type(rule).opened is SourceRule.opened
        and type(rule).written is SourceRule.written
    ):
        return rule.config.sublayers_per_block
    raise ConfigError(
        got=f"a pipeline of a model with {type(rule).__name__}",
        expected="the standard residual, or a rule that keeps sources as AttnRes does",
        do="train it in one stage (sharding works with any rule)",
    )


def shallow(module: M) -> M:
    """Copies a module that goes on to hold the same ones, and may be given others.

    Example:
        >>> whole = nn.Sequential(nn.Linear(2, 2))
        >>> own = shallow(whole)
        >>> own[0] is whole[0]
        True
        >>> own[0] = nn.Identity()
        >>> whole
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
        )
    """
    own = copy.copy(module)
    own._modules = dict(module._modules)
    return own


def _rule_of_sites(rule: ResidualRule[Any], sites: Sequence[Site]) -> ResidualRule[Any]:
    """Copies a rule with the readers of some sites only; the readers themselves are shared."""
    own = shallow(rule)
    if isinstance(rule, SourceRule):
        names = [reader_name(site, part) for site in sites for part in rule.parts(site)]
        own.readers = nn.ModuleDict({name: rule.readers[name] for name in names})
    return own

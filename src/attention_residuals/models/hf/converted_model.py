"""A converted Transformers model behind this library's own interface."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from attention_residuals.errors import ConfigError
from attention_residuals.layers.attention import Cache
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Pass, Tap
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.hf.install import depth_of, install
from attention_residuals.models.hf.kimi_linear import choices_told, require_possible, routers_of
from attention_residuals.models.hf.passing import Passing
from attention_residuals.models.hf.saving import NOT_KEPT, config_of, own_tensors
from attention_residuals.models.language_model import LanguageModel, RouterShape, checked_positions

__all__ = ["ConvertedModel"]


class ConvertedModel(LanguageModel):
    """Lets a converted model train, evaluate, generate and be traced as a ``Decoder`` is.

    It holds the model, and nothing of its own; ``transformers`` goes back. Like all models here it runs
    without dropout.

    Args:
        model: As ``convert`` returned it.
        checkpoint_activations: Keep only the residual state between layers for backward.

    Raises:
        ConversionError: The model is not converted.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from attention_residuals.layers.residual import AttnRes
        >>> from attention_residuals.models.hf.conversion import convert
        >>> shape = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, num_key_value_heads=1)
        >>> model = ConvertedModel(convert(LlamaForCausalLM(shape), AttnRes()))
        >>> model(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 64])
    """

    def __init__(self, model: PreTrainedModel, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        depth = depth_of(model)
        self.config: ConvertedConfig = config_of(model)
        self.checkpoint_activations = checkpoint_activations
        self.residual = depth.rule  # first, so that its parameters have the names that they have elsewhere
        self.transformers = model
        if checkpoint_activations:
            model.activation_checkpointing_enable()
        self._passing = Passing(model)
        self.train()

    @classmethod
    def of(cls, config: ConvertedConfig, *, checkpoint_activations: bool = False) -> "ConvertedModel":
        """Makes a new model of a config, with weights drawn at random.

        Raises:
            ConfigError: This version of Transformers knows no such model, or a Kimi Linear model whose layers
                or experts do not go together.
        """
        require_possible(config.original)
        try:
            described = {name: value for name, value in config.original.items() if name not in NOT_KEPT}
            original = AutoConfig.for_model(**described)
            model = AutoModelForCausalLM.from_config(original)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                got=f"a config of {config.original.get('model_type')!r}: {error}",
                expected="a causal language model that the installed Transformers has code for",
                do="install the version of Transformers that the model was converted with",
            ) from error
        require_possible(model.config.to_dict())  # with the defaults of Transformers
        install(model, config)
        return cls(model, checkpoint_activations=checkpoint_activations)

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
        """Computes the logits of every next token; see ``LanguageModel.forward``.

        Raises:
            ConfigError: A cache for a model with other than attention layers, a mask of pairs for one whose
                layers do not all see the same, or a tap on a pass whose activations are checkpointed.
        """
        num_cached = 0 if cache is None else cache.num_tokens
        positions = checked_positions(self.config, tokens, positions, mask, num_cached, num_logits)
        self._require_one_run(tap)
        given = self._passing.arguments(
            positions, mask, self.transformers.dtype, cache=cache, num_logits=num_logits
        )
        if tap is not None:
            tap.begin(Pass(tokens, positions, mask))
        telling = choices_told(self.transformers, tap, len(tokens))
        with depth_of(self.transformers).running(residual, tap), telling:
            logits: Tensor = self.transformers(input_ids=tokens, **given).logits
        if cache is not None:
            cache.advance(tokens.shape[1])
        return logits if num_logits is None else logits[:, -num_logits:]

    def unembed(self, state: Float[Tensor, "*BT D"]) -> Float[Tensor, "*BT V"]:
        """Makes logits of a state: the model's last norm, its head, and what it does to logits."""
        config = self.transformers.config.get_text_config()
        norm = self.transformers.get_submodule(self.config.norms[-1])
        logits: Tensor = self.transformers.get_output_embeddings()(norm(state))  # type: ignore[no-untyped-call]
        logits = logits / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def sublayer_kinds(self) -> dict[str, str]:
        """What each sublayer of Kimi Linear is, by writer: KDA, MLA, MLP or MoE."""
        config = self.transformers.config
        if not self._passing.is_recurrent:
            return {}
        words = {"linear_attention": "KDA", "full_attention": "MLA", "dense": "MLP", "sparse": "MoE"}
        return {
            f"L{layer}.{site}": words[kind]
            for layer, kinds in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True))
            for site, kind in zip(("attention", "mlp"), kinds, strict=True)
        }

    @property
    def routers(self) -> dict[str, RouterShape]:
        """The sublayers of Kimi Linear that choose experts, by writer."""
        found = routers_of(self.transformers)
        return {
            writer: RouterShape(router.num_experts, router.top_k or 0) for writer, router in found.items()
        }

    def settle(self) -> None:
        """Balances the load of experts by what was chosen since the last step; for Kimi Linear."""
        for router in routers_of(self.transformers).values():
            router.balance()

    def train(self, mode: bool = True) -> "ConvertedModel":
        """Leaves dropout off, whatever the mode."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):  # it asks for its own mode, not for dropout's
                module.training = self.checkpoint_activations
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns each tensor once, by the name that it has in the model of Transformers."""
        return own_tensors(self.transformers)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what ``state_dict`` gave; tied weights stay tied."""
        if strict and own_tensors(self.transformers).keys() != state_dict.keys():
            return self.transformers.load_state_dict(state_dict, strict=True)
        loaded = self.transformers.load_state_dict(state_dict, strict=False, assign=assign)
        self.transformers.tie_weights()
        return loaded

    def _require_one_run(self, tap: Tap | None) -> None:
        if tap is not None and self.checkpoint_activations and torch.is_grad_enabled():
            raise ConfigError(
                got="a tap on a pass whose activations are computed twice",
                expected="a pass without gradients, or a model without checkpoint_activations",
                do="call it under torch.no_grad()",
            )

"""The decoder's config in the form that Transformers expects."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from attention_residuals.configs import decode, encode
from attention_residuals.errors import ConfigError
from attention_residuals.models import presets
from attention_residuals.models.building import MODEL_CONFIGS
from attention_residuals.models.config import DecoderConfig

__all__ = ["AttnResConfig"]

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_width",
    "max_position_embeddings": "max_tokens",
    "tie_word_embeddings": "tied",
}
"""Transformers' names of what the decoder's config holds."""


class AttnResConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """A ``DecoderConfig`` that Transformers can store, load and ask for sizes.

    The decoder's config is kept once, in ``model``; Transformers' names such as ``hidden_size`` read it.
    Make one with ``AttnResConfig.of``; without arguments it describes a model of two layers.

    Args:
        model: The decoder's config as JSON, as ``configs.encode`` makes it.
        use_cache: Return keys and values unless told otherwise, except in training mode.
        bos_token_id: Begins a text.
        eos_token_id: Ends a text; generation stops there.
        pad_token_id: Fills up the shorter sequences of a batch.
        **kwargs: What every config of Transformers takes.

    Raises:
        ConfigError: A residual rule or field that this version does not know, or a value out of range.

    Example:
        >>> config = AttnResConfig.of(presets.scaled(4, vocab_size=300))
        >>> config.hidden_size, config.num_hidden_layers, config.model["residual"]["type"]
        (64, 4, 'AttnRes')
    """

    model_type = "attention_residuals"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        *,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name in sorted(kwargs.keys() & _FIELDS.keys()):
            raise ConfigError(
                got=f"{name}={kwargs[name]!r}",
                expected="a DecoderConfig",
                do=f"AttnResConfig.of(DecoderConfig({_FIELDS[name]}=..., ...))",
            )
        self.model = encode(presets.scaled(2, vocab_size=257)) if model is None else model
        self.model = encode(self.decoder_config)
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**kwargs)

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
    ) -> "AttnResConfig":
        """Wraps a decoder's config.

        Args:
            config: Of the decoder.
            bos_token_id: Begins a text.
            eos_token_id: Ends a text.
            pad_token_id: Fills up the shorter sequences of a batch.
        """
        return cls(
            model=encode(config),
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )

    @property
    def decoder_config(self) -> DecoderConfig:
        """The decoder's config, checked.

        Raises:
            ConfigError: ``model`` is not one that this version knows.
        """
        config = decode(self.model, MODEL_CONFIGS)
        if not isinstance(config, DecoderConfig):
            raise ConfigError(
                got=f"model={self.model!r}",
                expected='{"type": "DecoderConfig", ...}',
                do="make it with AttnResConfig.of(DecoderConfig(...))",
            )
        return config

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary; can be set, since embeddings can be resized."""
        return self.decoder_config.vocab_size

    @vocab_size.setter
    def vocab_size(self, vocab_size: int) -> None:
        self.model = encode(replace(self.decoder_config, vocab_size=vocab_size))

    @property
    def hidden_size(self) -> int:
        """The model's width."""
        return self.decoder_config.width

    @property
    def intermediate_size(self) -> int:
        """The inner width of the MLP."""
        return self.decoder_config.mlp_width

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return self.decoder_config.num_layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self.decoder_config.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads."""
        return self.decoder_config.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.decoder_config.head_width

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that the model accepts."""
        return self.decoder_config.max_tokens

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head shares the embedding's matrix."""
        return self.decoder_config.tied


AutoConfig.register(AttnResConfig.model_type, AttnResConfig)

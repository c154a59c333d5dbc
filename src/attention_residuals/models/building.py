"""Makes a model of its config."""

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import RULES
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.decoder import Decoder
from attention_residuals.models.language_model import LanguageModel, ModelConfig

__all__ = ["MODEL_CONFIGS", "build"]

MODEL_CONFIGS: dict[str, type] = {
    config.__name__: config for config in (DecoderConfig, ConvertedConfig, *RULES.values())
}
"""The types that a model's config.json may hold."""


def build(config: ModelConfig, *, checkpoint_activations: bool = False) -> LanguageModel:
    """Makes a new model, with weights drawn at random.

    Args:
        config: Of a ``Decoder`` or of a converted model.
        checkpoint_activations: Keep less for backward and compute it again.

    Raises:
        ConfigError: A converted model, and Transformers is not installed.

    Example:
        >>> from attention_residuals.models import presets
        >>> type(build(presets.scaled(2, vocab_size=300))).__name__
        'Decoder'
    """
    if isinstance(config, DecoderConfig):
        return Decoder(config, checkpoint_activations=checkpoint_activations)
    if not isinstance(config, ConvertedConfig):
        raise ConfigError(
            got=f"model={config!r}",
            expected="a DecoderConfig or a ConvertedConfig",
            do="take one from presets, or convert a model",
        )
    try:
        from attention_residuals.models.hf.converted_model import ConvertedModel
    except ImportError as error:
        raise ConfigError(
            got=f"a model of Transformers, and no usable Transformers ({error})",
            expected="the package that the model's layers come from",
            do="pip install 'attention-residuals[hf]'",
        ) from error
    return ConvertedModel.of(config, checkpoint_activations=checkpoint_activations)

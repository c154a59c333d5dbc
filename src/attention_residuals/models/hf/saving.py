"""Converted models in folders that both this library and the Auto classes of Transformers read."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention_residuals.errors import ConfigError
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.hf.survey import embedding_of
from attention_residuals.models.weights import write_model

__all__ = ["config_of", "described", "save_converted", "saved_as_converted"]


def save_converted(model: PreTrainedModel, folder: Path | str) -> None:
    """Writes a converted model into a folder that has none yet; ``model.save_pretrained`` does the same.

    ``load_model`` reads it, and so does ``AutoModelForCausalLM.from_pretrained`` once
    ``attention_residuals.models.hf`` is imported. Without this library nothing reads it: its config names a
    type of its own, so that no loader takes the weights for those of an ordinary model.

    Raises:
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    write_model(config_of(model), _tensors(model), folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def config_of(model: PreTrainedModel) -> ConvertedConfig:
    """Returns the config of a converted model, as the model is by now."""
    converted: ConvertedConfig = model.__dict__["conversion"]
    return replace(converted, transformers=described(model), vocab_size=len(embedding_of(model)))


def described(model: PreTrainedModel) -> str:
    """Returns a model's own config as JSON, without the place that it was loaded from."""
    own = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(own, sort_keys=True)


def saved_as_converted(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` write what only loaders read that know the residual rule."""
    own: Any = type(model)
    model.__class__ = _saving(own)


@cache
def _saving(own: Any) -> Any:
    def save_pretrained(self: Any, save_directory: Any, *, push_to_hub: bool = False, **others: Any) -> None:
        if push_to_hub:
            raise ConfigError(
                got="push_to_hub=True", expected="a local folder", do="save, and upload the folder yourself"
            )
        save_converted(self, save_directory)

    return type(own.__name__, (own,), {"save_pretrained": save_pretrained, "__module__": own.__module__})


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Names each tensor once, as ``ConvertedModel`` does."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    rule = "attention_residuals."
    return {
        f"residual.{name.removeprefix(rule)}" if name.startswith(rule) else f"transformers.{name}": tensor
        for name, tensor in model.state_dict().items()
        if name in own
    }

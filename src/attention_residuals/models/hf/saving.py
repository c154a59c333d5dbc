"""Converted models in folders that both this library and the Auto classes of Transformers read."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from attention_residuals.errors import ConfigError, ConversionError
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.hf.survey import embedding_of
from attention_residuals.models.weights import CONVERTED, write_model

__all__ = ["config_of", "described", "own_tensors", "save_converted", "saved_as_converted"]


NOT_KEPT = ("_name_or_path", "attn_implementation", "_attn_implementation")
"""Of a model's own config: where it lay, and the name of a kernel, which could be code on a hub."""


def save_converted(
    model: PreTrainedModel, folder: Path | str, *, state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Writes a converted model into a folder that has none yet; ``model.save_pretrained`` does the same.

    ``load_model`` reads it, and so does ``AutoModelForCausalLM.from_pretrained`` once
    ``attention_residuals.models.hf`` is imported. Without this library nothing reads it: its config names a
    type of its own, so that no loader takes the weights for those of an ordinary model.

    Args:
        model: As ``convert`` returned it.
        folder: Is made if it does not exist.
        state_dict: Tensors to write in the place of the model's own, by the same names.

    Raises:
        ConversionError: The model has tensors that no converted model has, such as adapters.
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    tensors = own_tensors(model)
    foreign = next((name for name in tensors if ".lora_" in name or "modules_to_save" in name), None)
    if foreign is not None:
        raise ConversionError(
            got=f"a model with {foreign}",
            expected="a converted model and nothing else",
            do="save the adapter with its own save_pretrained, or merge it: merge_and_unload()",
        )
    if state_dict is not None:
        tensors = {name: state_dict[name] for name in tensors}
    write_model(config_of(model), tensors, folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def config_of(model: PreTrainedModel) -> ConvertedConfig:
    """Returns the config of a converted model, as the model is by now."""
    converted: ConvertedConfig = model.__dict__["conversion"]
    return replace(converted, transformers=described(model.config), vocab_size=len(embedding_of(model)))


def described(config: PreTrainedConfig) -> str:
    """Returns a model's own config as JSON, without the place that it was loaded from."""
    own = {name: value for name, value in config.to_dict().items() if name not in NOT_KEPT}
    return json.dumps(own, sort_keys=True)


def saved_as_converted(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` write what only loaders read that know the residual rule."""
    own: Any = type(model)
    model.__class__ = _saving(own)


@cache
def _saving(own: Any) -> Any:
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        push_to_hub: bool = False,
        **others: Any,
    ) -> None:
        wrong = {"push_to_hub": push_to_hub, "variant": others.get("variant")}
        if others.get("safe_serialization") is False or any(wrong.values()):
            raise ConfigError(
                got=f"{', '.join(name for name, value in wrong.items() if value) or 'safe_serialization=False'}",
                expected="safetensors in a local folder",
                do="leave it out, and upload the folder yourself",
            )
        if not is_main_process:
            return
        folder = Path(save_directory)
        if _is_converted(folder):  # as Transformers' own models, it takes the place of what it wrote before
            (folder / "model.safetensors").unlink(missing_ok=True)
        save_converted(self, folder, state_dict=state_dict)

    def activation_checkpointing_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(one, dict) and one.get("use_reentrant") for one in (*args, *kwargs.values())):
            raise ConfigError(
                got="use_reentrant=True",
                expected="non-reentrant checkpointing, which sees gradients inside of a residual state",
                do='pass {"use_reentrant": False}, the default',
            )
        own.activation_checkpointing_enable(self, *args, **kwargs)

    changed = {
        "save_pretrained": save_pretrained,
        "activation_checkpointing_enable": activation_checkpointing_enable,
        "__module__": own.__module__,
    }
    return type(own.__name__, (own,), changed)


def _is_converted(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text())["model_type"] == CONVERTED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns each tensor once, however many names it has, by the name that the model's own loaders know."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in own}

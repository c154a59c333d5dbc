"""Lets ``AutoModelForCausalLM.from_pretrained`` read the folders of converted models."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from attention_residuals.errors import ConfigError
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.weights import CONVERTED, load_model

__all__ = ["ConvertedAutoConfig", "ConvertedForCausalLM"]


class ConvertedAutoConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """What the Auto classes make of the config.json of a converted model."""

    model_type = CONVERTED

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class ConvertedForCausalLM:
    """Where ``AutoModelForCausalLM.from_pretrained`` finds converted models."""

    config_class = ConvertedAutoConfig

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, *, config: PreTrainedConfig | None = None, dtype: Any = None, **others: Any
    ) -> PreTrainedModel:
        """Loads what ``save_converted`` wrote.

        Args:
            folder: Where it lies.
            config: As read from the folder.
            dtype: Of the weights; None and "auto" leave them as they were saved.
            **others: Refused, unless they ask for nothing.

        Raises:
            ConfigError: An option that no converted model has.
            CheckpointError: A file is missing or damaged.
        """
        others.pop("adapter_kwargs", None)  # the Auto classes' own
        dtype = others.pop("torch_dtype", dtype)
        nothing_new = {"use_safetensors", "local_files_only", "low_cpu_mem_usage"}
        asked = {
            name: value
            for name, value in others.items()
            if value not in (None, False)
            and name not in nothing_new
            and (name, value) != ("device_map", "cpu")
        }
        if asked:
            raise ConfigError(
                got=f"{', '.join(asked)} for a converted model",
                expected="a local folder, and dtype",
                do="leave the others out, and move the model afterwards",
            )
        model = load_model(folder)
        assert isinstance(model, ConvertedModel)
        wanted = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        loaded = model.transformers if wanted in (None, "auto") else model.transformers.to(wanted)
        if (Path(folder) / "generation_config.json").exists():
            loaded.generation_config = GenerationConfig.from_pretrained(str(folder))
        return loaded


AutoConfig.register(CONVERTED, ConvertedAutoConfig)
AutoModelForCausalLM.register(ConvertedAutoConfig, ConvertedForCausalLM)

"""Checkpoints of Inkling2's text model, as Transformers stores it."""

from pathlib import Path
from typing import Any

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.models.formats.checkpoint import (
    Checkpoint,
    read_checkpoint,
    refuse_own_code,
    write_checkpoint,
)
from attention_residuals.models.hf.inkling2_model import Inkling2Model
from attention_residuals.models.hf.trained import plain_fields, require_known, require_plausible, stored_dtype
from attention_residuals.models.language_model import LanguageModel

__all__ = ["load_inkling2", "save_inkling2"]

MODEL_TYPE, TEXT_TYPE, ARCHITECTURE = "inkling2", "inkling2_text", "Inkling2ForCausalLM"


def load_inkling2(folder: Path | str) -> Inkling2Model:
    """Reads an Inkling2 text model, which runs Transformers' sublayers around the ``Inkling2`` rule.

    Tensors that Transformers keeps in float32, such as depth queries, are float32 here whatever they are
    stored in. The stored rows of the head beyond ``unpadded_vocab_size`` are no tokens' and are not kept.

    Args:
        folder: Holds config.json, of type ``inkling2_text`` or ``inkling2``, and safetensors in plain
            numbers. A vision tower is refused, since it would be dropped silently.

    Raises:
        CheckpointError: A damaged or foreign checkpoint, one that wants code of its own, the looped variant,
            or tensors that are missing, left over, misshapen or quantised.

    Source:
        The ``inkling2`` model of Transformers 5.24.
    """
    checkpoint = read_checkpoint(folder)
    text = _text(checkpoint)
    where = checkpoint.folder / "config.json"
    refuse_own_code(checkpoint)
    require_known(text, (), where)
    require_plausible(checkpoint, num_hidden_layers=text.get("num_hidden_layers"))
    vision = [
        name for name in checkpoint.tensors if name.startswith(("model.visual.", "model.vision_tower."))
    ]
    if vision:
        raise CheckpointError(
            got=f"{checkpoint.folder} with {len(vision)} tensors of a vision tower, the first is {min(vision)}",
            expected="the text model alone",
            do="load it as Transformers' Inkling2ForCausalLM, which takes the text part, and save that",
        )
    dtype = stored_dtype(checkpoint, "model.llm.embed.weight")
    return Inkling2Model.read(checkpoint, {**text, "dtype": dtype})


def save_inkling2(model: LanguageModel, folder: Path | str) -> None:
    """Writes an Inkling2 text model as Transformers does, into a folder that has none yet.

    ``AutoModelForCausalLM.from_pretrained`` of Transformers reads it.

    Args:
        model: As ``load_inkling2`` gave it.
        folder: Is made if it does not exist.

    Raises:
        ConfigError: Another model, or a layer with one query whose readers differ.
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    if not isinstance(model, Inkling2Model):
        raise ConfigError(
            got=f"a {type(model).__name__}",
            expected="an Inkling2Model, as load_inkling2 gives it",
            do="keep it in this package's own format, with save_model",
        )
    config = {"architectures": [ARCHITECTURE], **plain_fields(model.config.original)}
    write_checkpoint(folder, config=config, tensors=model.stored())


def _text(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the config of the text model, whichever way it is stored."""
    config, model_type = checkpoint.config, checkpoint.config.get("model_type")
    text = config.get("text_config") if model_type == MODEL_TYPE else config
    if not isinstance(text, dict) or text.get("model_type") != TEXT_TYPE:
        raise CheckpointError(
            got=f"{checkpoint.folder / 'config.json'} with model_type {model_type!r}",
            expected=f"{TEXT_TYPE!r}, or {MODEL_TYPE!r} with a text_config; inkling2_loop is another rule",
            do="load it with the loader of its own format",
        )
    return text

"""Checkpoints of open-attention-residuals: Qwen3 with depth attention over cumulative states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from attention_residuals.errors import CheckpointError, ConfigError, is_count, is_finite
from attention_residuals.layers.residual import Cumulative
from attention_residuals.models.formats.checkpoint import (
    Checkpoint,
    read_checkpoint,
    refuse_own_code,
    write_checkpoint,
)
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.hf.trained import (
    load_trained,
    plain_fields,
    require_known,
    require_plausible,
    require_trained,
    stored_tensors,
    trained_config,
)
from attention_residuals.models.language_model import LanguageModel

__all__ = ["load_open_attnres", "save_open_attnres"]

MODEL_TYPE, BASE_TYPE, ARCHITECTURE = "qwen3_attnres", "qwen3", "Qwen3AttnResForCausalLM"
DEFAULTS: dict[str, Any] = {
    "attnres_num_blocks": 8,
    "attnres_recency_bias_init": 3.0,
    "attnres_mode": "block",
    "attnres_gate_type": "bias",
}
LEGACY = ("attnres_init_bias", "attnres_gate_init")
"""Fields that the repository itself ignores."""


def load_open_attnres(folder: Path | str) -> ConvertedModel:
    """Reads a model that open-attention-residuals has trained.

    It is not the paper's method: sources are snapshots of a stream that is never reset, a learned bias
    favours the stream, and the output reads the stream itself. The traces of the model say so.

    Args:
        folder: Holds config.json, of type ``qwen3_attnres``, and safetensors.

    Returns:
        The model, with the bits and the dtype of the file.

    Raises:
        CheckpointError: A damaged or foreign checkpoint, one that wants code of its own, another gate than
            ``"bias"``, or tensors that are missing, left over or misshapen.

    Source:
        modeling_attnres.py of wdlctc/open-attention-residuals at 4d5f557.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint.config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            got=f"{checkpoint.folder / 'config.json'} with model_type {checkpoint.config.get('model_type')!r}",
            expected=f"{MODEL_TYPE!r}, of open-attention-residuals",
            do="load it with the loader of its own format",
        )
    refuse_own_code(checkpoint)
    fields = {**checkpoint.config, "model_type": BASE_TYPE}
    require_known(
        fields, (*DEFAULTS, *LEGACY, "rope_scaling", "rope_theta"), checkpoint.folder / "config.json"
    )
    residual = _residual(checkpoint)
    kept = {name: value for name, value in fields.items() if name not in LEGACY}
    config = trained_config(checkpoint, kept, residual, "model.embed_tokens.weight")
    return load_trained(checkpoint, config, _stored)


def save_open_attnres(model: LanguageModel, folder: Path | str) -> None:
    """Writes a model as open-attention-residuals would, bit for bit, into a folder that has none yet.

    Args:
        model: A ``ConvertedModel`` around Qwen3 with the ``Cumulative`` rule, Full or in blocks of as many
            layers as some number of blocks gives.
        folder: Is made if it does not exist.

    Raises:
        ConfigError: The format cannot express the model.
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    own = require_trained(model, BASE_TYPE, (Cumulative,))
    assert isinstance(model, ConvertedModel)
    residual = model.config.residual
    assert isinstance(residual, Cumulative)
    config = {"architectures": [ARCHITECTURE], **plain_fields(own), "model_type": MODEL_TYPE}
    config |= {**DEFAULTS, "attnres_recency_bias_init": residual.recency_bias}
    config |= _blocks(residual.sublayers_per_block, own)
    write_checkpoint(folder, config=config, tensors=stored_tensors(model, _stored))


def _stored(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Names what is stored of a tensor."""
    if not name.startswith("attention_residuals."):
        return {name: tensor}
    _, _, reader, parameter = name.split(".")
    layer, _, kind = reader.removeprefix("L").partition("_")
    stem = f"model.layers.{layer}.{'attn' if kind == 'attention' else kind}_res"
    ends = {
        "pseudo_query": ("proj.weight", tensor[None]),
        "key_gain": ("norm.weight", tensor),
        "recency_bias": ("bias", tensor[0]),
    }
    end, stored = ends[parameter]
    return {f"{stem}_{end}": stored}


def _residual(checkpoint: Checkpoint) -> Cumulative:
    """Reads the rule; its norms have the eps of all others."""
    fields = {**DEFAULTS, **checkpoint.config}
    num_layers, eps = fields.get("num_hidden_layers"), fields.get("rms_norm_eps", 1e-6)
    require_plausible(checkpoint, num_hidden_layers=num_layers)
    assert isinstance(num_layers, int)
    wrong = {
        "attnres_gate_type": fields["attnres_gate_type"] != "bias"
        and "'bias': the gated forms are other rules",
        "attnres_mode": fields["attnres_mode"] not in ("block", "full") and "'block' or 'full'",
        "attnres_num_blocks": not is_count(fields["attnres_num_blocks"]) and "a number, 1 or more",
        "attnres_recency_bias_init": not is_finite(fields["attnres_recency_bias_init"]) and "a number",
        "rms_norm_eps": not (is_finite(eps) and eps >= 0) and "a number >= 0",
    }
    for name, expected in wrong.items():
        if expected:
            raise CheckpointError(
                got=f"{checkpoint.folder / 'config.json'} with {name}={fields[name]!r}",
                expected=expected,
                do="run it with the repository's own code, if this is what it was trained with",
            )
    size = 1
    if fields["attnres_mode"] == "block":
        size = 2 * _layers_per_block(num_layers, fields["attnres_num_blocks"])
    bias = float(fields["attnres_recency_bias_init"])
    return Cumulative(sublayers_per_block=size, key_eps=float(eps), recency_bias=bias)


def _layers_per_block(num_layers: int, num_blocks: int) -> int:
    return -(-num_layers // num_blocks)


def _blocks(sublayers_per_block: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """Tells the size of blocks as the repository does, by a number of blocks."""
    num_layers, before = (
        own["num_hidden_layers"],
        own.get("attnres_num_blocks", DEFAULTS["attnres_num_blocks"]),
    )
    if sublayers_per_block == 1:
        return {"attnres_mode": "full", "attnres_num_blocks": before}
    for num_blocks in (before, *range(1, num_layers + 1)):
        if 2 * _layers_per_block(num_layers, num_blocks) == sublayers_per_block:
            return {"attnres_num_blocks": num_blocks}
    raise ConfigError(
        got=f"sublayers_per_block={sublayers_per_block} for {num_layers} layers",
        expected="1, or twice the layers of a block when the layers are divided into some number of blocks",
        do="keep it in this package's own format, with save_model",
    )

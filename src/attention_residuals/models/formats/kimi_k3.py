"""Checkpoints in the layout of Kimi K3: Kimi Linear's sublayers with Block attention residuals around them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from attention_residuals.errors import CheckpointError, ConfigError, is_count, is_finite
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.layers.residual.attnres import AttnResRule
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.layers.tap import OUTPUT, Site
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

__all__ = ["KimiK3AttnRes", "load_kimi_k3", "save_kimi_k3"]

MODEL_TYPE, TEXT_TYPE = "kimi_k3", "kimi_linear"
ARCHITECTURE, TEXT_ARCHITECTURE = "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"
PREFIX = "language_model."

FIXED: dict[str, tuple[object, ...]] = {
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_nextn_predict_layers": (0,),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True,),
}
"""Fields of Moonshot's config that Transformers' KimiLinear has one value of."""

FREE = ("attn_res_block_size", "first_k_dense_replace", "linear_attn_config", "rope_theta")
"""Those that are read, and ``rope_theta``, which layers without rotary embeddings do not use."""

LINEAR = {"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}

BEYOND = {
    "mla_use_output_gate": "gated MLA",
    "use_full_rank_gate": "linear attention with a gate of full rank",
    "gate_lower_bound": "a bounded forget gate",
    "routed_expert_hidden_size": "latent experts",
    "activation_situ_beta": "the activation SiTU",
    "quantization_config": "quantised experts",
    ".self_attn.g_proj.weight": "gated MLA, or a gate of full rank",
    ".block_sparse_moe.routed_expert_down_proj.weight": "latent experts",
    ".w1.weight_packed": "quantised experts",
}
"""What the released Kimi K3 has and KimiLinear lacks, by a field of the config or the end of a tensor's name."""

FLOAT32 = ("A_log", "dt_bias", "o_norm.weight", "gate.weight", "e_score_correction_bias")
"""What KimiLinear computes in float32 anyway."""


class KimiK3AttnRes(NamedTuple):
    """The attention residuals of a checkpoint: the rule with its weights, and the names of all other tensors."""

    rule: AttnResRule
    others: tuple[str, ...]


@overload
def load_kimi_k3(folder: Path | str, *, attn_res_only: Literal[False] = False) -> ConvertedModel: ...


@overload
def load_kimi_k3(folder: Path | str, *, attn_res_only: Literal[True]) -> KimiK3AttnRes: ...


def load_kimi_k3(folder: Path | str, *, attn_res_only: bool = False) -> ConvertedModel | KimiK3AttnRes:
    """Reads a model in the layout of Kimi K3, or its attention residuals alone.

    A whole model runs the sublayers of Transformers' KimiLinear. These are not those of the released K3,
    which is refused: its latent attention is gated and its experts work in a latent space. Its attention
    residuals can be read.

    Args:
        folder: Holds config.json and safetensors. The config is of type ``kimi_k3`` with a ``text_config``,
            or of type ``kimi_linear``; ``attn_res_block_size`` counts layers, and null means standard
            residuals. The dense MLPs may be called ``mlp``, as Moonshot does, or ``block_sparse_moe``.
        attn_res_only: Read the attention residuals alone, and none of the data of the other tensors.

    Returns:
        The model, with the bits and the dtype of the file; or the rule and the names of the other tensors.

    Raises:
        CheckpointError: A damaged or foreign checkpoint, one that wants code of its own, tensors that are
            missing, left over or misshapen, or sublayers that KimiLinear does not have.

    Source:
        Kimi K3 (arXiv:2607.24653).
    """
    checkpoint = read_checkpoint(folder)
    text = _text(checkpoint)
    residual = _residual(checkpoint, text)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in checkpoint.tensors) else ""
    if attn_res_only:
        return _attn_res(checkpoint, residual, text, prefix)
    _require_supported(checkpoint, text)
    embedding = f"{prefix}model.embed_tokens.weight"
    config = trained_config(checkpoint, text, residual, embedding)
    _require_agreement(checkpoint, config.original)
    by_own = f"{prefix}model.layers.0.block_sparse_moe.gate_proj.weight" in checkpoint.tensors
    layout = partial(_stored, config.original, prefix, "block_sparse_moe" if by_own else "mlp")
    return load_trained(checkpoint, config, layout, float32=FLOAT32)


def save_kimi_k3(model: LanguageModel, folder: Path | str) -> None:
    """Writes a model in the layout of Kimi K3, bit for bit, into a folder that has none yet.

    A model that was read from a config of type ``kimi_k3`` gets one with a ``text_config`` again and the
    tensors the prefix ``language_model.``; every other is written as text only. Names are Moonshot's.

    Args:
        model: A ``ConvertedModel`` around KimiLinear with standard residuals, or with attention residuals
            in blocks of whole layers.
        folder: Is made if it does not exist.

    Raises:
        ConfigError: The layout cannot express the model.
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    own = require_trained(model, TEXT_TYPE, (AttnRes, StandardResidual))
    assert isinstance(model, ConvertedModel)
    nested = own["architectures"] == [ARCHITECTURE]
    layout = partial(_stored, own, PREFIX if nested else "", "mlp")
    text = {**plain_fields(own), **_moonshot(own)}
    text["attn_res_block_size"] = _layers_per_block(model.config.residual, own)
    config = {"architectures": [TEXT_ARCHITECTURE], **text}
    if nested:
        config = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": own["dtype"]}
        config["text_config"] = text
    write_checkpoint(folder, config=config, tensors=stored_tensors(model, layout))


def _stored(own: Mapping[str, Any], prefix: str, dense: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Names what is stored of a tensor."""
    if name.startswith("attention_residuals."):
        _, _, reader, parameter = name.split(".")
        stem = prefix + _stems(own["num_hidden_layers"])[reader]
        if parameter == "pseudo_query":
            return {f"{stem}_proj.weight": tensor[None]}
        return {f"{stem}_norm.weight": tensor}
    stored = prefix + name.replace(".forget_gate.", ".")
    stem, _, last = stored.rpartition(".mlp.")
    if not stem:
        if stored.endswith(".conv1d.weight"):
            return {
                stored.replace(".conv1d.", f".{kind}_conv1d."): part
                for kind, part in zip("qkv", tensor.chunk(3), strict=True)
            }
        return {stored: tensor}
    if own["mlp_layer_types"][int(stem.rpartition(".")[2])] == "dense":
        return {f"{stem}.{dense}.{last}": tensor}
    experts = f"{stem}.block_sparse_moe.experts"
    if last == "experts.down_proj":
        return {f"{experts}.{number}.w2.weight": expert for number, expert in enumerate(tensor)}
    if last == "experts.gate_up_proj":
        return {
            f"{experts}.{number}.{part}.weight": half
            for number, expert in enumerate(tensor)
            for part, half in zip(("w1", "w3"), expert.chunk(2), strict=True)
        }
    return {f"{stem}.block_sparse_moe.{last}": tensor}


def _stems(num_layers: int) -> dict[str, str]:
    """Names the tensors of each reader, without their ends."""
    stems = {reader_name(OUTPUT): "model.output_attn_res"}
    for number in range(num_layers):
        stems[reader_name(Site(number, "attention"))] = f"model.layers.{number}.self_attention_res"
        stems[reader_name(Site(number, "mlp"))] = f"model.layers.{number}.mlp_res"
    return stems


def _attn_res(
    checkpoint: Checkpoint, residual: ResidualConfig, text: Mapping[str, Any], prefix: str
) -> KimiK3AttnRes:
    """Reads the tensors of the rule alone."""
    if not isinstance(residual, AttnRes):
        raise CheckpointError(
            got=f"{checkpoint.folder} with attn_res_block_size null",
            expected="a model with attention residuals",
            do="load it whole: its residual connections are the standard ones",
        )
    width = text.get("hidden_size")
    if not (isinstance(width, int) and is_count(width)):
        raise _out_of_range(checkpoint, "hidden_size", width, "the width of the model")
    with torch.device("meta"):
        rule = residual.build(num_layers=text["num_hidden_layers"], width=width)
    own = {name: (f"attention_residuals.{name}", tensor) for name, tensor in rule.state_dict().items()}
    stored = {name: _stored(text, prefix, "mlp", *item) for name, item in own.items()}
    claims = {key: tuple(part.shape) for parts in stored.values() for key, part in parts.items()}
    tensors = checkpoint.load_part(claims)
    state = {name: tensors[key].view(width) for name, parts in stored.items() for key in parts}
    rule.load_state_dict(state, assign=True)
    return KimiK3AttnRes(rule, checkpoint.unclaimed(claims))


def _text(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the config of the language model, whichever way it is stored."""
    config, model_type = checkpoint.config, checkpoint.config.get("model_type")
    text = config.get("text_config") if model_type == MODEL_TYPE else config
    if not isinstance(text, dict) or text.get("model_type") != TEXT_TYPE:
        inner = f" and text_config {text!r:.60}" if model_type == MODEL_TYPE else ""
        raise CheckpointError(
            got=f"{checkpoint.folder / 'config.json'} with model_type {model_type!r}{inner}",
            expected=f"{MODEL_TYPE!r} with a text_config of {TEXT_TYPE!r}, or {TEXT_TYPE!r}",
            do="load it with the loader of its own format",
        )
    nested = model_type == MODEL_TYPE
    outer = {name: config[name] for name in ("attn_res_block_size", "quantization_config") if name in config}
    return {**outer, **text, "architectures": [ARCHITECTURE if nested else TEXT_ARCHITECTURE]}


def _residual(checkpoint: Checkpoint, text: Mapping[str, Any]) -> ResidualConfig:
    """Reads the rule; its norms have the eps of all others."""
    num_layers, eps = text.get("num_hidden_layers"), text.get("rms_norm_eps", 1e-5)
    require_plausible(checkpoint, num_hidden_layers=num_layers)
    assert isinstance(num_layers, int)
    if "attn_res_block_size" not in text:
        raise CheckpointError(
            got=f"{checkpoint.folder / 'config.json'} without attn_res_block_size",
            expected="a number of layers, or null for standard residuals",
            do="load a plain Kimi Linear with Transformers; convert(...) gives it attention residuals",
        )
    size = text["attn_res_block_size"]
    if size is None:
        return StandardResidual()
    if not is_count(size):
        raise _out_of_range(checkpoint, "attn_res_block_size", size, "a number of layers, 1 or more")
    if not (is_finite(eps) and eps >= 0):
        raise _out_of_range(checkpoint, "rms_norm_eps", eps, "a number >= 0")
    # A block may be larger than the model there; it is the same as one block of all sublayers.
    return AttnRes(sublayers_per_block=2 * min(size, num_layers), key_eps=float(eps))


def _require_supported(checkpoint: Checkpoint, text: Mapping[str, Any]) -> None:
    """Refuses what KimiLinear has no code for, by name, and configs with fields of unknown meaning."""
    where = checkpoint.folder / "config.json"
    linear = text.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise _out_of_range(checkpoint, "linear_attn_config", linear, "an object")
    told = {name for name, value in {**text, **linear}.items() if value not in (None, False)}
    found = [
        f"{part} ({name})"
        for sign, part in BEYOND.items()
        for name in sorted(name for name in (*told, *checkpoint.tensors) if name.endswith(sign))[:1]
    ]
    if found:
        raise CheckpointError(
            got=f"{checkpoint.folder} with {', '.join(found)}",
            expected="the sublayers of Transformers' KimiLinear, in plain numbers",
            do="read its attention residuals with attn_res_only=True",
        )
    refuse_own_code(checkpoint)
    for name, values in FIXED.items():
        if name in text and text[name] not in values:
            raise _out_of_range(checkpoint, name, text[name], " or ".join(map(repr, values)))
    require_known(text, (*FIXED, *FREE), where)
    require_known({"model_type": TEXT_TYPE, **linear}, LINEAR, where)
    experts = text.get("num_experts", text.get("num_local_experts", 1))
    require_plausible(checkpoint, num_experts=experts)


def _require_agreement(checkpoint: Checkpoint, own: Mapping[str, Any]) -> None:
    """Refuses a config whose two ways to tell the kinds of layers tell different things."""
    told = {**own, **(own.get("linear_attn_config") or {})}
    kinds = _moonshot(own)
    for name, value in {**kinds.pop("linear_attn_config"), **kinds}.items():
        if name in told and told[name] != value:
            raise _out_of_range(checkpoint, name, told[name], f"{value!r}, as the other fields tell")


def _moonshot(own: Mapping[str, Any]) -> dict[str, Any]:
    """Tells the kinds of layers as Moonshot's config does, which counts them from 1."""
    kinds, mlps = own["layer_types"], own["mlp_layer_types"]
    num_dense = mlps.index("sparse") if "sparse" in mlps else len(mlps)
    linear = {
        "head_dim": own["linear_head_dim"],
        "num_heads": own["linear_num_heads"],
        "short_conv_kernel_size": own["linear_conv_kernel_dim"],
        "full_attn_layers": [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "kda_layers": [number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"],
    }
    return {"linear_attn_config": linear, "first_k_dense_replace": num_dense}


def _layers_per_block(residual: ResidualConfig, own: Mapping[str, Any]) -> int | None:
    if not isinstance(residual, AttnRes):
        return None
    size, before = residual.sublayers_per_block // 2, own.get("attn_res_block_size")
    if residual.sublayers_per_block % 2:
        raise ConfigError(
            got=f"sublayers_per_block={residual.sublayers_per_block}",
            expected="an even number: the blocks of Kimi K3 are whole layers",
            do="keep it in this package's own format, with save_model",
        )
    return before if before is not None and min(before, own["num_hidden_layers"]) == size else size


def _out_of_range(checkpoint: Checkpoint, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        got=f"{checkpoint.folder / 'config.json'} with {name}={value!r}",
        expected=expected,
        do="see whether the config belongs to these weights",
    )

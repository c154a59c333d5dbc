"""The paper's own architecture: Kimi Linear's layers with attention residuals around them, tiny to 48B."""

import json
from dataclasses import dataclass
from typing import Any

from attention_residuals.errors import ConfigError, nearest
from attention_residuals.layers.residual import AttnRes, MultiHead, ResidualConfig
from attention_residuals.models.converted import ConvertedConfig, read_scales

__all__ = ["KIMI_LINEAR_SHAPES", "KimiLinearShape", "kimi_linear"]

LINEAR, FULL = "linear_attention", "full_attention"
"""What Transformers calls layers of Kimi Delta Attention and of multi-head latent attention."""


@dataclass(frozen=True, kw_only=True)
class KimiLinearShape:
    """What the sizes of Kimi Linear differ in.

    Layers 3, 7, 11, ... and the last one, counted from 0, attend to the whole text (MLA, without positions);
    the others are Kimi Delta Attention. The first layer has a dense MLP, the others experts.

    Args:
        num_layers: L.
        width: D.
        num_heads: Of either attention.
        head_width: Of Kimi Delta Attention, and of MLA's values and of its keys for themselves.
        latent_width: From which MLA makes its keys and values.
        shared_key_width: Of the part of its keys that all heads share.
        dense_width: Inner width of the first layer's MLP.
        expert_width: Inner width of one expert.
        num_experts: Of which each token chooses some.
        num_active: That it chooses; one more is shared by all tokens.
        sublayers_per_block: S of the usual attention residuals.
        max_tokens: The longest sequence.
    """

    num_layers: int
    width: int
    num_heads: int
    head_width: int = 128
    latent_width: int = 512
    shared_key_width: int = 64
    dense_width: int
    expert_width: int
    num_experts: int = 64
    num_active: int = 8
    sublayers_per_block: int
    max_tokens: int = 8192

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of attention of each layer, in the words of Transformers."""
        last = self.num_layers - 1
        return tuple(FULL if layer % 4 == 3 or layer == last else LINEAR for layer in range(self.num_layers))


def _of_the_scaling_runs(
    num_layers: int, width: int, expert_width: int, sublayers_per_block: int
) -> KimiLinearShape:
    return KimiLinearShape(
        num_layers=num_layers,
        width=width,
        num_heads=num_layers,
        dense_width=9 * expert_width,
        expert_width=expert_width,
        sublayers_per_block=sublayers_per_block,
    )


KIMI_LINEAR_SHAPES = {
    "kimi-linear-tiny": KimiLinearShape(
        num_layers=8,
        width=128,
        num_heads=4,
        head_width=32,
        latent_width=32,
        shared_key_width=16,
        dense_width=352,
        expert_width=32,
        num_experts=8,
        num_active=2,
        sublayers_per_block=4,
        max_tokens=2048,
    ),
    "kimi-linear-194m": _of_the_scaling_runs(12, 896, 400, 3),
    "kimi-linear-241m": _of_the_scaling_runs(13, 960, 432, 3),
    "kimi-linear-296m": _of_the_scaling_runs(14, 1024, 464, 4),
    "kimi-linear-436m": _of_the_scaling_runs(16, 1168, 528, 4),
    "kimi-linear-528m": _of_the_scaling_runs(17, 1264, 560, 4),
    "kimi-linear-48b": KimiLinearShape(
        num_layers=27,
        width=2304,
        num_heads=32,
        dense_width=9216,
        expert_width=1024,
        num_experts=256,
        sublayers_per_block=6,
        max_tokens=32_768,
    ),
}
"""A size for two cores, the paper's five scaling runs by their active parameters, and its large run."""


def kimi_linear(
    name: str, *, vocab_size: int = 163_840, residual: ResidualConfig | None = None
) -> ConvertedConfig:
    """Returns the config of a Kimi Linear model around a residual rule.

    Of the scaling runs the paper gives layers, heads, width, width of an expert and context. Not published,
    and chosen here after the Kimi Linear paper: 8 of 64 experts and one shared, heads 128 wide, three layers
    of Kimi Delta Attention for each of MLA with a latent of 512; a first MLP as wide as the nine experts.

    Each norm's eps is that of Kimi Linear, 1e-5, times the square of what share of the sum its fresh read is,
    so that at first the model computes exactly what a standard Kimi Linear with the same weights does.

    Args:
        name: One of ``KIMI_LINEAR_SHAPES``.
        vocab_size: V; Kimi's by default.
        residual: The rule; the paper's Block form by default.

    Raises:
        ConfigError: Unknown name, or no size of a vocabulary.

    Source:
        Attention Residuals (arXiv:2603.15031), sections 5.1 and 5.2; Kimi Linear (arXiv:2510.26692).

    Example:
        >>> config = kimi_linear("kimi-linear-48b")
        >>> config.num_layers, config.residual.sublayers_per_block
        (27, 6)
        >>> [layer for layer, kind in enumerate(config.original["layer_types"]) if kind == "full_attention"]
        [3, 7, 11, 15, 19, 23, 26]
    """
    if name not in KIMI_LINEAR_SHAPES:
        raise ConfigError(
            got=f"preset {name!r}", expected="a known preset", do=nearest(name, KIMI_LINEAR_SHAPES)
        )
    shape = KIMI_LINEAR_SHAPES[name]
    fields = _fields(shape, vocab_size)
    residual = residual or AttnRes(sublayers_per_block=shape.sublayers_per_block)
    layers = [f"model.layers.{number}" for number in range(shape.num_layers)]
    # A share does not depend on the width, so the narrowest one that the rule takes will do.
    narrowest = residual.num_heads if isinstance(residual, MultiHead) else 1
    scales = read_scales(residual.build(num_layers=shape.num_layers, width=narrowest))
    return ConvertedConfig(
        transformers=json.dumps(fields, sort_keys=True),
        vocab_size=vocab_size,
        width=shape.width,
        max_tokens=shape.max_tokens,
        residual=residual,
        decoder="model",
        first_layer=layers[0],
        norms=(*(f"{layer}.{norm}_layernorm" for layer in layers for norm in NORMS), "model.norm"),
        eps=tuple(fields["rms_norm_eps"] * scale**2 for scale in scales),
    )


NORMS = ("input", "post_attention")


def _fields(shape: KimiLinearShape, vocab_size: int) -> dict[str, Any]:
    """Writes a shape in the words of Transformers."""
    return {
        "model_type": "kimi_linear",
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "linear_num_heads": shape.num_heads,
        "linear_head_dim": shape.head_width,
        "linear_conv_kernel_dim": 4,
        "kv_lora_rank": shape.latent_width,
        "q_lora_rank": None,
        "qk_rope_head_dim": shape.shared_key_width,
        "qk_nope_head_dim": shape.head_width,
        "v_head_dim": shape.head_width,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_active,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_tokens,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": list(shape.layer_types),
        "mlp_layer_types": ["dense", *["sparse"] * (shape.num_layers - 1)],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }

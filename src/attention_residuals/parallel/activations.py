"""How much layers keep for backward: formulas, and the same formulas in words."""

from collections.abc import Sequence
from typing import Any

from attention_residuals.errors import ConfigError
from attention_residuals.models import DecoderConfig
from attention_residuals.models.kimi_linear import FULL
from attention_residuals.models.language_model import ModelConfig
from attention_residuals.ops.delta import CHUNK

__all__ = ["activation_bytes", "activation_formula"]


def activation_bytes(
    config: ModelConfig, layers: Sequence[int], *, itemsize: int, checkpoint_activations: bool = False
) -> int:
    """Counts the bytes that layers keep of each token for backward.

    Every layer keeps 4 D numbers: its two normalised inputs, and what its two sublayers leave in the residual
    state. Depth reads keep sources, which are there anyway, and some scalars, which are not counted. Sublayers
    keep what ``activation_formula`` says in words: queries, keys and values, what comes out of attention, and
    what an MLP makes its output of. With checkpointing a layer keeps what it leaves in the state, at most 2 D,
    and one layer at a time is computed again.

    Args:
        config: Of a decoder of this package or of Kimi Linear.
        layers: Of the stage, by number, 0 being the first of the model.
        itemsize: Bytes of a number, but where the delta rule computes in float32.
        checkpoint_activations: Layers are computed again in backward.

    Raises:
        ConfigError: Another model.

    Example:
        >>> from attention_residuals.models import presets
        >>> activation_bytes(presets.scaled(8, vocab_size=300), range(1), itemsize=1)
        2432
        >>> kimi = presets.kimi_linear("kimi-linear-48b")
        >>> of_layer = [activation_bytes(kimi, [layer], itemsize=2) for layer in (0, 1, 3)]
        >>> of_layer  # KDA and MLP, KDA and MoE, MLA and MoE
        [752128, 825856, 210048]
    """
    if isinstance(config, DecoderConfig):
        kept = [(_inside_decoder(config), 0)] * len(layers)
    else:
        shape = _kimi_shape(config)
        kept = [_inside_kimi(shape, layer) for layer in layers]
    one = [itemsize * (4 * config.width + count) + 4 * in_float32 for count, in_float32 in kept]
    return len(one) * 2 * config.width * itemsize + max(one) if checkpoint_activations else sum(one)


def activation_formula(config: ModelConfig) -> list[str]:
    """Says in words what ``activation_bytes`` counts for a token and a layer.

    Raises:
        ConfigError: As ``activation_bytes``.

    Example:
        >>> from attention_residuals.models import presets
        >>> activation_formula(presets.scaled(8, vocab_size=300))
        ['4 D + 3 A + 2 K + 4 F, D 128, A 128, K 64, F 352']
    """
    if isinstance(config, DecoderConfig):
        heads, keys = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
        return [f"4 D + 3 A + 2 K + 4 F, D {config.width}, A {heads}, K {keys}, F {config.mlp_width}"]
    shape = _kimi_shape(config)
    channels = shape.linear_num_heads * shape.linear_head_dim
    return [
        f"4 D and what its sublayers keep, D {config.width}",
        f"KDA: 9 C + 2 K, and in float32 27 C + C K / {CHUNK // 2} + {3 * CHUNK} H, C {channels}, "
        f"K {shape.linear_head_dim}, H {shape.linear_num_heads}, by this library's delta rule (FLA's kernels "
        "keep less)",
        f"MLA: 2 Q + 2 U + 3 R + P, Q {_queries(shape)}, U {_values(shape)}, R {shape.kv_lora_rank}, "
        f"P {shape.qk_rope_head_dim}, without the matrix of scores",
        f"MLP: 4 F, F {shape.intermediate_size}; MoE: 4 (A + N) E + 2 A D, E "
        f"{shape.moe_intermediate_size}, for A {shape.num_experts_per_tok} experts that a token chooses "
        f"and N {shape.n_shared_experts} shared",
    ]


def _inside_decoder(config: DecoderConfig) -> int:
    """Counts what attention and MLP of a layer keep beside their inputs."""
    heads, keys = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    return 3 * heads + 2 * keys + 4 * config.mlp_width


def _inside_kimi(shape: Any, layer: int) -> tuple[int, int]:
    """Counts the same of a layer of Kimi Linear, and apart from it what of KDA is always float32."""
    if shape.mlp_layer_types[layer] == "dense":
        mlp = 4 * shape.intermediate_size
    else:
        chosen, shared = shape.num_experts_per_tok, shape.n_shared_experts
        mlp = 4 * (chosen + shared) * shape.moe_intermediate_size + 2 * chosen * shape.hidden_size
    if shape.layer_types[layer] == FULL:
        latent = 3 * shape.kv_lora_rank + shape.qk_rope_head_dim
        return 2 * _queries(shape) + 2 * _values(shape) + latent + mlp, 0
    width, heads = shape.linear_head_dim, shape.linear_num_heads
    # The memories between chunks, and numbers for each pair of tokens of a chunk.
    memories, pairs = 2 * heads * width * width // CHUNK, 3 * CHUNK * heads
    return 9 * heads * width + 2 * width + mlp, 27 * heads * width + memories + pairs


def _queries(shape: Any) -> int:
    return int(shape.num_attention_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim))


def _values(shape: Any) -> int:
    return int(shape.num_attention_heads * shape.v_head_dim)


def _kimi_shape(config: ModelConfig) -> Any:
    """Returns a Kimi Linear model's config of Transformers, which knows fields by more than one name."""
    original: dict[str, Any] = getattr(config, "original", {})
    if original.get("model_type") != "kimi_linear":
        raise ConfigError(
            got=f"activations of a model of type {original.get('model_type')!r}",
            expected="a decoder of this package, or Kimi Linear",
            do="plan a preset of the same shape",
        )
    # With Transformers, which takes seconds to import, as the model of this config has been made.
    from transformers import AutoConfig

    return AutoConfig.for_model(**original)

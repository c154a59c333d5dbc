"""What a Kimi Linear model costs on paper: parameters, operations, cache and traffic; nothing is allocated."""

from typing import Any, NamedTuple

import torch

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    ResidualConfig,
    ResidualRule,
    SourceRule,
    TwoPhaseRule,
    rehearse,
)
from attention_residuals.models.building import build
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.kimi_linear import FULL, LINEAR
from attention_residuals.ops.traffic import counting

__all__ = ["Costs", "costs", "read_operations"]


class Costs(NamedTuple):
    """Counts of a model; one of parameters is a number, one of operations a multiplication or an addition."""

    total: int
    """All parameters, the biases by which experts are balanced included."""
    active: int
    """Those that work on one token: of the experts, the ones that it chooses and the shared one."""
    embeddings: int
    """The table of the embedding and that of the head, both part of ``total`` and of ``active``."""
    residual: int
    """What the residual rule learns, part of both as well."""
    operations: int
    """Of a forward pass for one token: twice the active matrices, the head included, and what attention does
    with ``context`` tokens. Additions of vectors, norms and activations are not counted."""
    reads: int
    """Further operations, of the depth reads: a score, a norm and a share of the mix for each source, 6 D."""
    cache: int
    """Bytes that each token adds to the cache of MLA, in bfloat16."""
    state: int
    """Bytes that a sequence of any length has in the memories of Kimi Delta Attention, in float32, and in the
    inputs of its convolutions, in bfloat16."""
    vectors: float
    """Vectors of width D that depth reads and writes move through memory for a token and sublayer, in one
    phase, as the fused operations do."""
    vectors_in_two_phases: float
    """The same where phase 1 reads all finished blocks once for all sites of a block."""


def costs(config: ConvertedConfig, *, context: int | float = 0) -> Costs:
    """Counts what a Kimi Linear model costs.

    Args:
        config: As ``presets.kimi_linear`` makes it.
        context: Tokens that each token attends to, 0 or more; a mean over tokens gives the mean of operations.

    Raises:
        ConfigError: A model of another architecture, or a context below 0.

    Example:
        >>> from attention_residuals.models import presets
        >>> found = costs(presets.kimi_linear("kimi-linear-48b"))
        >>> f"{found.total / 1e9:.1f} B, {(found.total - found.embeddings) / 1e9:.1f} B without embeddings"
        '49.1 B, 48.4 B without embeddings'
    """
    if config.original.get("model_type") != "kimi_linear" or context < 0:
        raise ConfigError(
            got=f"a model of type {config.original.get('model_type')!r} and context={context}",
            expected="a Kimi Linear model, and 0 tokens or more",
            do="take one from presets.kimi_linear",
        )
    with torch.device("meta"):
        model = build(config)
    shape: Any = model.get_submodule("transformers").config
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    biases = sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith("_bias"))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    resting = experts - experts * shape.num_experts_per_tok // shape.num_local_experts
    residual = sum(parameter.numel() for parameter in model.residual.parameters())
    tables = 2 * config.vocab_size * config.width
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "A_log" not in name)
    one, two = _vectors(config.residual, model.residual)
    return Costs(
        total=sum(sizes.values()) + biases,
        active=sum(sizes.values()) + biases - resting,
        embeddings=tables,
        residual=residual,
        operations=2 * (matrices - resting - tables // 2) + _attention(shape, context),
        reads=read_operations(model.residual),
        cache=2 * shape.layer_types.count(FULL) * (shape.kv_lora_rank + shape.qk_rope_head_dim),
        state=shape.layer_types.count(LINEAR) * _state(shape),
        vectors=one,
        vectors_in_two_phases=two,
    )


def _attention(shape: Any, context: int | float) -> int:
    """Counts what attention does beside its matrices: scores and values of MLA, the memories of KDA."""
    width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    full = 2 * shape.num_attention_heads * width * context
    # A memory decays (1), is recalled (2), corrected (2) and read (2), for each of its numbers.
    linear = 7 * shape.linear_num_heads * shape.linear_head_dim**2
    return int(shape.layer_types.count(FULL) * full + shape.layer_types.count(LINEAR) * linear)


def _state(shape: Any) -> int:
    channels = shape.linear_num_heads * shape.linear_head_dim
    return int(4 * channels * shape.linear_head_dim + 2 * 3 * channels * shape.linear_conv_kernel_dim)


def read_operations(rule: ResidualRule[Any]) -> int:
    """Counts the operations of a rule's depth reads for one token, as ``Costs.reads`` does.

    Example:
        >>> from attention_residuals.layers.residual import AttnRes
        >>> read_operations(AttnRes().build(num_layers=2, width=8)) == 6 * 8 * (1 + 2 + 3 + 4 + 5)
        True
    """
    if not isinstance(rule, SourceRule):
        return 0
    return 6 * rule.width * sum(rule.num_sources(site) * len(rule.parts(site)) for site in rule.sites())


def _vectors(config: ResidualConfig, rule: ResidualRule[Any]) -> tuple[float, float]:
    """Runs a narrow rule of the same depth while bytes are counted."""
    width = 4
    narrow = config.build(num_layers=rule.num_layers, width=width)
    two = TwoPhaseRule(narrow) if isinstance(narrow, SourceRule) else narrow
    found = []
    for schedule in (narrow, two):
        with counting() as traffic:
            rehearse(schedule, torch.ones(1, 1, width))
        found.append((traffic.read + traffic.written) / (4 * width * 2 * rule.num_layers))
    return found[0], found[1]

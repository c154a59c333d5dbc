"""What a pipeline costs on paper: memory of each rank, communication, waiting; nothing is allocated."""

from typing import Any, NamedTuple

import torch

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual import ResidualRule, SourceRule
from attention_residuals.models import build
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.costs import costs, read_operations
from attention_residuals.models.language_model import LanguageModel, ModelConfig
from attention_residuals.parallel.activations import activation_bytes
from attention_residuals.parallel.plan import Plan, even_layers, plan
from attention_residuals.parallel.schedules import (
    SCHEDULES,
    Action,
    bubble,
    most_held,
    orders,
    schedule_named,
)
from attention_residuals.parallel.stages import cut, layout_of

__all__ = [
    "BYTES_PER_PARAMETER",
    "Estimate",
    "Operations",
    "RankMemory",
    "bubbles",
    "estimate",
    "operations",
]

BYTES_PER_PARAMETER = 16
"""Weight, gradient and the two moments of AdamW, each in float32, as this package trains."""


class RankMemory(NamedTuple):
    """What one rank needs, in bytes."""

    rank: int
    layers: tuple[int, ...]
    """Of each of its stages."""
    num_parameters: int
    parameters: int
    """Weights, gradients and optimizer together."""
    activations: int
    """At the fullest moment of the schedule."""
    buffers: int
    """Into which PyTorch receives pieces and gradients: one for each of all microbatches, made at the start."""
    held: int
    """Most that the store holds for later stages; it lies in buffers and activations, so it adds nothing."""

    @property
    def total(self) -> int:
        """Is all of it."""
        return self.parameters + self.activations + self.buffers


class Estimate(NamedTuple):
    """What a pipeline costs."""

    plans: dict[str, Plan]
    """By transport: naive, paper, cached."""
    ranks: tuple[RankMemory, ...]
    piece_bytes: int
    """One vector of the residual state for the tokens of a microbatch."""
    bubble: float


def estimate(
    config: ModelConfig,
    *,
    num_ranks: int,
    stages_per_rank: int,
    num_microbatches: int,
    num_tokens: int,
    schedule: str,
    itemsize: int = 2,
    num_shards: int = 1,
    checkpoint_activations: bool = False,
) -> Estimate:
    """Estimates a pipeline from its plan and from the order in which PyTorch's schedule works.

    Args:
        config: Of a decoder of this package or of Kimi Linear.
        num_ranks: P.
        stages_per_rank: V.
        num_microbatches: M.
        num_tokens: Of one microbatch: its sequences times their length.
        schedule: One of ``SCHEDULES``.
        itemsize: Bytes of a number in activations and in what is sent, 1 or more.
        num_shards: Over how many ranks parameters, gradients and optimizer are spread; 1 if not at all.
        checkpoint_activations: Layers are computed again in backward.

    Raises:
        ConfigError: The stages fit neither the model nor the schedule, or it is another model.

    Example:
        >>> from attention_residuals.models import presets
        >>> found = estimate(
        ...     presets.paper("paper-194m", vocab_size=32_000),
        ...     num_ranks=4, stages_per_rank=2, num_microbatches=8, num_tokens=4096, schedule="Interleaved1F1B",
        ... )
        >>> [found.plans[transport].num_sent for transport in ("naive", "paper", "cached")]
        [38, 31, 27]
    """
    if not is_count(num_tokens) or not is_count(num_shards):
        raise ConfigError(
            got=f"num_tokens={num_tokens!r}, num_shards={num_shards!r}",
            expected="whole numbers, 1 or more",
            do="count the tokens of one microbatch",
        )
    layers = even_layers(config.num_layers, num_ranks * stages_per_rank)
    model = _without_memory(config)
    layout = layout_of(model, layers, num_ranks=num_ranks, placement=schedule_named(schedule).placement)
    order = orders(
        schedule,
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=num_microbatches,
    )
    plans = {transport: plan(layout, transport) for transport in ("naive", "paper", "cached")}
    piece = num_tokens * config.width * itemsize
    stages, ours = cut(model, layers), plans["cached"]
    work = [
        num_tokens
        * activation_bytes(
            config,
            stage.numbers,
            itemsize=itemsize,
            checkpoint_activations=checkpoint_activations,
        )
        for stage in stages
    ]
    # Of logits: the logits, and their softmax in float32 for the loss.
    work[-1] += num_tokens * config.vocab_size * (itemsize + 4)
    ranks = []
    for rank, actions in enumerate(order):
        own = ours.stages_of(rank)
        # By name, since two stages of a rank may have a tied matrix; biases that balance experts are there too.
        state = {k: v.numel() for stage in own for k, v in stages[stage.stage].state_dict().items()}
        count = sum(state.values())
        passing = sum(len(stage.receives) + len(stage.sends) for stage in own)
        ranks.append(
            RankMemory(
                rank,
                tuple(layers[stage.stage] for stage in own),
                count,
                -(-count * BYTES_PER_PARAMETER // num_shards),
                _most_activations(actions, work),
                num_microbatches * passing * piece,
                most_held(ours, actions) * piece,
            )
        )
    return Estimate(plans, tuple(ranks), piece, bubble(order))


def _most_activations(actions: tuple[Action, ...], work: list[int]) -> int:
    """Replays a rank's order; the first stage's activations stay until its backward for weights."""
    most = now = 0
    for action in actions:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * work[action.stage]
        most = max(most, now)
    return most


def bubbles(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> dict[str, float | str]:
    """Returns the share of waiting of every schedule, or why a schedule does not admit such a pipeline.

    Example:
        >>> found = bubbles(2, 2, 8)
        >>> round(found["Interleaved1F1B"], 4), found["1F1B"]
        (0.0588, 'takes 1 on each rank')
    """
    found: dict[str, float | str] = {}
    for name in SCHEDULES:
        try:
            found[name] = bubble(
                orders(
                    name,
                    num_ranks=num_ranks,
                    stages_per_rank=stages_per_rank,
                    num_microbatches=num_microbatches,
                )
            )
        except ConfigError as error:
            found[name] = f"takes {error.expected}"
    return found


class Operations(NamedTuple):
    """What depth reads add to a model, for each token."""

    model: int
    """Floating point operations of a forward pass without depth reads: twice the weights of its matrices."""
    reads: int
    """Those of all depth reads: a score, a norm and a share of the mix for each source, 6 D."""
    vectors: float
    """Vectors of width D that reads and writes move for a sublayer, as ``Costs.vectors``; the standard residual
    moves 3."""


def operations(config: ModelConfig) -> Operations:
    """Counts what depth reads add to a forward pass.

    Args:
        config: Of a decoder of this package or of Kimi Linear, of which the experts that a token is not sent to
            are not counted.

    Raises:
        ConfigError: Another model.

    Example:
        >>> from attention_residuals.models import presets
        >>> found = operations(presets.paper("paper-436m", vocab_size=32_000))
        >>> round(found.reads / found.model, 4), found.vectors
        (0.0014, 8.8)
    """
    model = _without_memory(config)
    if isinstance(config, ConvertedConfig):
        work = costs(config).operations
    else:
        matrices = sum(p.numel() for p in model.get_submodule("layers").parameters() if p.ndim == 2)
        work = 2 * (matrices + config.vocab_size * config.width)
    return Operations(work, read_operations(model.residual), _moved(model.residual))


def _moved(rule: ResidualRule[Any]) -> float:
    """Counts the vectors that a rule's reads and writes move, for one sublayer."""
    if not isinstance(rule, SourceRule):
        return 3.0
    sites = rule.sites()
    # A read takes its sources and leaves what it has mixed of them.
    reads = [(rule.num_sources(site) + 1) * len(rule.parts(site)) for site in sites]
    size = rule.config.sublayers_per_block
    # A write adds to the open block, 2 read and 1 written, or starts one, and then nothing moves.
    writes = [3 if site.sublayer % size else 0 for site in sites[:-1]]
    return round((sum(reads) + sum(writes)) / len(writes), 1)


def _without_memory(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return build(config)

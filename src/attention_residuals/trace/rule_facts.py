"""What a residual rule costs and shows, found by running it once on a small model."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attention_residuals.layers.residual import ResidualConfig, ResidualRule, rehearse
from attention_residuals.layers.tap import OUTPUT
from attention_residuals.models import Decoder, presets
from attention_residuals.trace.recording import record
from attention_residuals.trace.trace import Trace

__all__ = ["RuleFacts", "rule_facts"]


class RuleFacts(NamedTuple):
    """What a rule costs and what a trace of it holds.

    ``parameters`` are those of one attention site, one MLP site (the last ones) and the output;
    ``state_vectors`` counts the vectors of the model's width that are kept for each token before the output
    read; ``num_sources`` is what the output reads.
    """

    parameters: dict[str, int]
    state_vectors: int
    num_sources: int
    trace: Trace


def rule_facts(config: ResidualConfig, *, num_layers: int = 8, width: int = 128) -> RuleFacts:
    """Builds a small model with the rule, runs it on one token and counts.

    Args:
        config: The rule.
        num_layers: L, 2 or more.
        width: D; a multiple of 4.

    Raises:
        ConfigError: The rule does not fit that shape.

    Example:
        >>> from attention_residuals import AttnRes
        >>> facts = rule_facts(AttnRes(sublayers_per_block=4), num_layers=8, width=128)
        >>> facts.parameters["output"], facts.state_vectors
        (256, 5)
    """
    shape = presets.scaled(num_layers, vocab_size=2, residual=config)
    model = Decoder(replace(shape, width=width))
    rule = model.residual
    last = num_layers - 1
    parameters = {
        name: sum(parameter.numel() for key, parameter in rule.named_parameters() if where in key)
        for name, where in (
            ("attention", f"L{last}_attention"),
            ("mlp", f"L{last}_mlp"),
            ("output", "output"),
        )
    }
    trace = record(model, torch.zeros(1, 1, dtype=torch.long))
    return RuleFacts(parameters, _state_vectors(rule, width), rule.num_sources(OUTPUT), trace)


def _state_vectors(rule: ResidualRule[object], width: int) -> int:
    """Counts what the state holds at the end; a tensor that it holds twice counts once."""
    _, state = rehearse(rule, torch.ones(1, 1, width))
    numbers = {tensor.data_ptr(): tensor.numel() for tensor in _tensors(state)}
    return sum(numbers.values()) // width


def _tensors(part: object) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    return [tensor for inner in part for tensor in _tensors(inner)] if isinstance(part, tuple) else []

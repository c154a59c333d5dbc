"""Highway connections: each output takes the place of a share of the state."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, is_finite
from attention_residuals.layers.residual.interface import (
    Norm,
    ResidualConfig,
    ResidualRule,
    Semantics,
    checked_output,
)
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.layers.tap import (
    EMBEDDING,
    OUTPUT,
    Site,
    Tap,
    offer_read,
    offer_write,
    ones_weights,
    unscored_read,
    writer_names,
)
from attention_residuals.ops import depth_logits, weighted_sum

__all__ = ["Highway", "HighwayRule", "HighwayState"]

_EPS = 1e-6  # of the norm that gates look through


@dataclass(frozen=True, kw_only=True)
class Highway(ResidualConfig):
    """A convex combination of the state and each new output, with one gate per token and sublayer.

    The gate looks at the state before the sublayer. It starts the same for every token and such that the
    state is the mean of all outputs before it, which makes a new model compute what the standard one does.
    Gates of one number a token and this start are ours; Highway Networks have a gate for each channel and
    one negative bias for all layers.

    Args:
        carry_bias: The start of every gate's bias in place of that; negative numbers favour the state.

    Source:
        Srivastava et al., arXiv:1505.00387; as depth mixing: Attention Residuals (arXiv:2603.15031),
        section 6.2.

    Example:
        >>> rule = Highway().build(num_layers=2, width=8)
        >>> [round(1 / (1 + math.exp(-gate.start)), 2) for gate in rule.gates.values()]
        [0.5, 0.33, 0.25, 0.2]
    """

    formula: ClassVar[str] = (
        "h_i = (1 - g_i) h_{i-1} + g_i v_i, g_i = sigmoid(w . h_{i-1} / rms(h_{i-1}) + b)"
    )
    carry_bias: float | None = None

    def __post_init__(self) -> None:
        if self.carry_bias is not None and not is_finite(self.carry_bias):
            raise ConfigError(
                got=f"carry_bias={self.carry_bias!r}",
                expected="a finite number or None",
                do="-2.0 favours the state; None makes it the mean of all outputs",
            )

    def build(self, *, num_layers: int, width: int) -> "HighwayRule":
        """Makes the rule, with D + 1 parameters per sublayer."""
        return HighwayRule(self, num_layers, width)


class HighwayState(NamedTuple):
    """The stream; under a tap also each writer's share in it, [W, B, T]."""

    stream: Tensor
    membership: tuple[Tensor, ...] = ()


class Gate(nn.Module):
    """The learned part of one write: a direction and a bias, both zero at the start.

    Args:
        width: D.
        start: Is added to the bias; apart from it, so that it is exact in every dtype.
    """

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.direction = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, stream: Tensor) -> Tensor:
        """Tells which share of the stream the new output replaces, one number per token."""
        logits: Tensor = depth_logits([stream], self.direction, eps=_EPS).logits[0]
        return (logits + (self.bias.to(logits.dtype) + self.start)).sigmoid()


class HighwayRule(ResidualRule[HighwayState]):
    """Reads the stream as it is; writes a share.

    To a tap, the stream is one source with weight 1 in which the writers' shares sum to 1 for every token.
    Give the tap to every call of a pass or to none.
    """

    semantics = Semantics(sources="cumulative", weights="one", output_read=False)

    def __init__(self, config: Highway, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.config = config
        self.gates = nn.ModuleDict(
            {
                reader_name(site): Gate(
                    width,
                    # sigmoid(-log n) = 1 / (n + 1): the new output is one of n + 1 in a mean.
                    -math.log(1 + self.num_written(site)) if config.carry_bias is None else config.carry_bias,
                )
                for site in self.sites()
                if site != OUTPUT
            }
        )

    def open(self, embedding: Tensor, tap: Tap | None = None) -> HighwayState:
        """Starts the stream."""
        stream = offer_write(tap, EMBEDDING, embedding)
        return HighwayState(stream) if tap is None else HighwayState(stream, (ones_weights(stream),))

    def read(
        self, state: HighwayState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], HighwayState]:
        """Normalises the stream."""
        if tap is not None:
            writers, one = writer_names(self.num_written(site)), ones_weights(state.stream)
            member_1WBT = state.membership[0][None]
            changed = offer_read(
                tap, unscored_read(site, ("stream",), (state.stream,), one, writers, member_1WBT)
            )
            if changed is not None:
                return (norm(weighted_sum(changed.weights, changed.values)),), state
        return (norm(state.stream),), state

    def write(self, state: HighwayState, site: Site, output: Tensor, tap: Tap | None = None) -> HighwayState:
        """Lets the output replace its share of the stream."""
        written = offer_write(tap, site, checked_output(output, state.stream, site))
        share_BT: Tensor = self.gates[reader_name(site)](state.stream)
        stream = torch.lerp(state.stream, written, share_BT.to(written.dtype)[..., None])
        if tap is None:
            return HighwayState(stream)
        share_1BT = share_BT.detach()[None]
        return HighwayState(stream, (torch.cat([(1 - share_1BT) * state.membership[0], share_1BT]),))

    def num_sources(self, site: Site) -> int:
        """Is 1: the stream."""
        return 1

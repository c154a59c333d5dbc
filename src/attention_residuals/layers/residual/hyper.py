"""Hyper-connections: several residual streams, read, mixed and written by gates that look at each token."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attention_residuals.errors import ConfigError, ShapeError, is_count
from attention_residuals.layers.norm import foldable
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
    Read,
    Site,
    Tap,
    offer_read,
    offer_write,
    writer_names,
)
from attention_residuals.ops import weighted_mix, weighted_sum
from attention_residuals.ops.depth_read import compute_dtype, second_derivative
from attention_residuals.ops.eager import inverse_rms, without_autocast

__all__ = [
    "Gates",
    "HyperConnections",
    "ManifoldHyperConnections",
    "StreamsConfig",
    "StreamsRule",
    "StreamsState",
]

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(ResidualConfig):
    """Options of every rule with several streams.

    Args:
        streams: How many, 1 or more; the papers' n.
    """

    streams: int = 4

    def __post_init__(self) -> None:
        if not is_count(self.streams):
            raise ConfigError(got=f"streams={self.streams!r}", expected="1 or more", do="the papers use 4")


class Gates(NamedTuple):
    """What a site does with the streams of each token: m weights to read, m to write, m by m to mix."""

    read: Float[Tensor, "B T m"]
    write: Float[Tensor, "B T m"]
    carry: Float[Tensor, "B T m m"]
    """Into which stream (rows) from which."""


class StreamsState(NamedTuple):
    """The streams; between a read and its write also the gates.

    Under a tap also how many times each stream holds each writer's output, [m, W, B, T].
    """

    streams: Float[Tensor, "B T m D"]
    gates: tuple[Tensor, ...] = ()
    membership: tuple[Tensor, ...] = ()


class StreamsRule(ResidualRule[StreamsState]):
    """What rules with several streams have in common.

    The streams start as copies of the embedding. A sublayer reads their sum by the read gates, they are
    mixed, and each gets the output times its write gate. The output reads their sum. A tap that changes a
    read changes what the sublayer sees; gates look at the streams themselves. Give the tap to every call
    of a pass or to none.
    """

    semantics = Semantics(sources="cumulative", weights="gates", output_read=False)

    def __init__(self, config: StreamsConfig, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.config = config
        self.gates = nn.ModuleDict(
            {reader_name(site): self.make_gates(site) for site in self.sites() if site != OUTPUT}
        )

    @abstractmethod
    def make_gates(self, site: Site) -> nn.Module:
        """Makes what one site learns: a module from streams [B, T, m, D] to ``Gates``."""

    def open(self, embedding: Tensor, tap: Tap | None = None) -> StreamsState:
        """Copies the embedding into every stream."""
        first = offer_write(tap, EMBEDDING, embedding)
        streams = first[..., None, :].expand(*first.shape[:-1], self.config.streams, -1)
        if tap is None:
            return StreamsState(streams)
        one = torch.ones((), dtype=compute_dtype(first.dtype), device=first.device)
        return StreamsState(streams, (), (one.expand(self.config.streams, 1, *first.shape[:-1]),))

    def read(
        self, state: StreamsState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], StreamsState]:
        """Sums the streams by the read gates, and leaves the other gates for the write."""
        values = state.streams.unbind(-2)
        if site == OUTPUT:
            weight_SBT = (
                values[0]
                .new_ones((1, 1, 1), dtype=compute_dtype(values[0].dtype))
                .expand(len(values), *values[0].shape[:-1])
            )
        else:
            with without_autocast(values[0].device.type):
                gates: Gates = self.gates[reader_name(site)](state.streams)
            weight_SBT = gates.read.movedim(-1, 0)
            state = state._replace(gates=(gates.write, gates.carry))
        mix = _normalised_mix(weight_SBT, values, norm)
        if tap is not None:
            changed = offer_read(
                tap,
                Read(
                    site=site,
                    part="in",
                    source_names=tuple(f"stream {number}" for number in range(len(values))),
                    sources=values,
                    values=values,
                    logits=None,
                    weights=weight_SBT,
                    inverse_norms=None,
                    writers=writer_names(self.num_written(site)),
                    membership=state.membership[0],
                ),
            )
            if changed is not None:
                mix = norm(weighted_sum(changed.weights, changed.values))
        return (mix,), state

    def write(self, state: StreamsState, site: Site, output: Tensor, tap: Tap | None = None) -> StreamsState:
        """Mixes the streams and adds the output to each, as the gates of the site's read say.

        Raises:
            ShapeError: The site has not read, or an output of another shape than the embedding's.
        """
        if not state.gates:
            raise ShapeError(
                got=f"a write at {site} before its read",
                expected="the state that the site's read returned",
                do="let every site read and write once, in the order of sites()",
            )
        write_BTm, carry_BTmm = state.gates
        written = offer_write(tap, str(site), checked_output(output, state.streams[..., 0, :], site))
        dtype = state.streams.dtype
        with without_autocast(written.device.type):
            streams = torch.baddbmm(
                (carry_BTmm.to(dtype) @ state.streams).flatten(0, 1),
                write_BTm.to(dtype).flatten(0, 1)[..., None],
                written.flatten(0, 1)[:, None],
            ).view_as(state.streams)
        if tap is None:
            return StreamsState(streams)
        carried = torch.einsum("btij,jwbt->iwbt", carry_BTmm.detach(), state.membership[0])
        added = write_BTm.detach().movedim(-1, 0)[:, None]
        return StreamsState(streams, (), (torch.cat([carried, added], dim=1),))

    def num_sources(self, site: Site) -> int:
        """Counts the streams."""
        return self.config.streams


@dataclass(frozen=True, kw_only=True)
class HyperConnections(StreamsConfig):
    """hc"""

    formula: ClassVar[str] = (
        "h = sum_k alpha_k s_k, s_j = sum_k A_kj s_k + beta_j v; alpha, beta, A per token"
    )

    def build(self, *, num_layers: int, width: int) -> "HyperRule":
        """Makes the rule"""
        return HyperRule(self, num_layers, width)


class HyperGates(nn.Module):
    def __init__(self, streams: int, width: int, number: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.zeros(2 + streams, width))
        start = torch.cat(
            [torch.eye(streams)[[number % streams]], torch.ones(1, streams), torch.eye(streams)]
        )
        self.static = nn.Parameter(start)
        self.read_scale = nn.Parameter(torch.full((1,), 0.01))
        self.write_scale = nn.Parameter(torch.full((1,), 0.01))

    def forward(self, streams: Tensor) -> Gates:
        score = _scores(streams, self.projection).tanh()
        scale = torch.cat([self.read_scale, self.write_scale, self.read_scale.expand(streams.shape[-2])])
        gate = torch.addcmul(self.static.T, score, scale)
        return Gates(gate[..., 0], gate[..., 1], gate[..., 2:].mT)


class HyperRule(StreamsRule):
    def make_gates(self, site: Site) -> HyperGates:
        return HyperGates(self.config.streams, self.width, site.sublayer)


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(StreamsConfig):
    """mhc"""

    formula: ClassVar[str] = "h = mhc"
    sinkhorn_steps: int = 20

    def build(self, *, num_layers: int, width: int) -> "ManifoldRule":
        return ManifoldRule(self, num_layers, width)


class ManifoldGates(nn.Module):
    def __init__(self, streams: int, width: int, number: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.projection = nn.Parameter(torch.zeros(2 * streams + streams**2, streams * width))
        read = torch.full((streams,), -math.log(max(3, 4 * streams - 5)))
        read[number % streams] = math.log(3)
        self.bias = nn.Parameter(torch.cat([read, torch.zeros(streams), 4 * torch.eye(streams).flatten()]))
        self.scales = nn.Parameter(torch.full((3,), 0.01))

    def forward(self, streams: Tensor) -> Gates:
        m = streams.shape[-2]
        sizes = [m, m, m * m]
        scale = self.scales.repeat_interleave(torch.tensor(sizes), output_size=sum(sizes))
        logit = torch.addcmul(self.bias, _scores(streams.flatten(-2), self.projection), scale)
        read, write, carry = logit.split(sizes, dim=-1)
        return Gates(read.sigmoid(), 2 * write.sigmoid(), sinkhorn(carry.unflatten(-1, (m, m)), self.steps))


class ManifoldRule(StreamsRule):
    config: ManifoldHyperConnections

    def make_gates(self, site: Site):
        return ManifoldGates(self.config.streams, self.width, site.sublayer, self.config.sinkhorn_steps)


def sinkhorn(logits, steps):
    return _Sinkhorn.apply(logits.movedim((-2, -1), (0, 1)).contiguous(), steps).movedim((0, 1), (-2, -1))


class _Sinkhorn(torch.autograd.Function):
    """The matrices' axes come first, so that sums over them run along tokens."""

    @staticmethod
    def forward(ctx, logits: Tensor, steps: int) -> Tensor:
        matrix = logits.softmax(0)
        sums = []
        for number in range(1, 2 * steps):
            sums.append(matrix.sum(number % 2, keepdim=True))
            matrix.div_(sums[-1])
        ctx.save_for_backward(matrix, *sums)
        return matrix

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        matrix, *sums = ctx.saved_tensors
        # Of the logarithms: a step subtracts from them the logarithm of a sum.
        matrix, grad = matrix.clone(), grad * matrix
        for number in reversed(range(len(sums) + 1)):
            grad.addcmul_(matrix, grad.sum(number % 2, keepdim=True), value=-1)
            if number:
                matrix.mul_(sums[number - 1])
        return grad, None


def _scores(rows: Tensor, projection: Tensor) -> Tensor:
    dtype = compute_dtype(rows.dtype)
    rows = rows.to(dtype)
    return F.linear(rows, projection.to(dtype)) * inverse_rms(rows, _EPS)[..., None]


def _normalised_mix(weights: Tensor, values: tuple[Tensor, ...], norm: Norm) -> Tensor:
    folded = foldable(norm)
    if folded is not None:
        return weighted_mix(weights, values, *folded)
    if not torch.is_grad_enabled():
        return norm(weighted_mix(weights, values))
    # Kept for backward: weights and streams. Mix and norm are made again.
    return checkpoint(
        lambda weights, *values: norm(weighted_mix(weights, values)),
        weights,
        *values,
        use_reentrant=False,
        preserve_rng_state=False,
    )

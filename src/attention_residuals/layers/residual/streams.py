"""What rules with several residual streams have in common: streams, gates that look at each token, reads."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
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
    Site,
    Tap,
    offer_read,
    offer_write,
    unscored_read,
    writer_names,
)
from attention_residuals.ops import traffic, weighted_mix, weighted_sum
from attention_residuals.ops.depth_read import compute_dtype, second_derivative
from attention_residuals.ops.eager import inverse_rms, without_autocast

__all__ = ["Gates", "StreamsConfig", "StreamsRule", "StreamsState", "gate_scores"]

_EPS = 1e-6  # of the norm that gates look through


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(ResidualConfig):
    """Options of every rule with several streams.

    Args:
        streams: How many, 1 or more; the n of the papers.
    """

    streams: int = 4

    def __post_init__(self) -> None:
        if not is_count(self.streams):
            raise ConfigError(got=f"streams={self.streams!r}", expected="1 or more", do="the papers use 4")


class Gates(NamedTuple):
    """What a site does with the S streams of each token."""

    read: Float[Tensor, "B T S"]
    """The weight of each stream in what the sublayer reads."""
    write: Float[Tensor, "B T S"]
    """How many times each stream takes the output."""
    carry: Float[Tensor, "B T S S"]
    """How the streams are mixed: into which (rows) from which (columns)."""


class StreamsState(NamedTuple):
    """The streams [B, T, S, D]; between a site's read and its write also the gates of the write.

    Under a tap also how many times each stream holds each writer's output, [S, W, B, T].
    """

    streams: Tensor
    gates: tuple[Tensor, ...] = ()
    membership: tuple[Tensor, ...] = ()


class StreamsRule(ResidualRule[StreamsState]):
    """Reads, mixes and writes several streams by gates that look at each token.

    The streams start as copies of the embedding, and the output reads their sum. A tap that changes a read
    changes what the sublayer sees; gates look at the streams themselves. Give the tap to every call of a
    pass or to none.
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
        """Makes what one site learns: a module that makes ``Gates`` of streams [B, T, S, D]."""

    def open(self, embedding: Tensor, tap: Tap | None = None) -> StreamsState:
        """Copies the embedding into every stream."""
        first = offer_write(tap, EMBEDDING, embedding)
        streams = first[..., None, :].expand(*first.shape[:-1], self.config.streams, -1)
        return StreamsState(streams) if tap is None else StreamsState(streams, (), (_ones(streams)[:, None],))

    def read(
        self, state: StreamsState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], StreamsState]:
        """Sums the streams by the site's weights, and leaves its other gates for the write."""
        values = state.streams.unbind(-2)
        weight_SBT = _ones(state.streams)
        if site != OUTPUT:
            with without_autocast(values[0].device.type):
                gates: Gates = self.gates[reader_name(site)](state.streams)
            traffic.note((state.streams, state.streams))  # once for the norm, once for the scores
            weight_SBT = gates.read.movedim(-1, 0)
            state = state._replace(gates=(gates.write, gates.carry))
        mix = _normalised_mix(weight_SBT, values, norm)
        if tap is not None:
            names = tuple(f"stream {number}" for number in range(len(values)))
            writers = writer_names(self.num_written(site))
            changed = offer_read(
                tap, unscored_read(site, names, values, weight_SBT, writers, state.membership[0])
            )
            if changed is not None:
                mix = norm(weighted_sum(changed.weights, changed.values))
        return (mix,), state

    def write(self, state: StreamsState, site: Site, output: Tensor, tap: Tap | None = None) -> StreamsState:
        """Mixes the streams and adds the output to each, by the gates that the site's read left.

        Raises:
            ShapeError: The site has not read, or the output has another shape than the embedding.
        """
        if not state.gates:
            raise ShapeError(
                got=f"a write at {site} without gates",
                expected="the state that the read at this site returned",
                do="let every site read and write once, in the order of sites()",
            )
        written = offer_write(tap, site, checked_output(output, state.streams[..., 0, :], site))
        write_BTS, carry_BTSS = state.gates
        with without_autocast(written.device.type):
            carried_BTSD = carry_BTSS.to(written.dtype) @ state.streams
            # Matrix products, so that backward needs no tensor of the streams' size but their gradients.
            streams_NSD = torch.baddbmm(
                carried_BTSD.flatten(0, 1),
                write_BTS.to(written.dtype).flatten(0, 1)[..., None],
                written.flatten(0, 1)[:, None],
            )
            traffic.note((state.streams, carried_BTSD, written), (carried_BTSD, streams_NSD))
            membership = () if tap is None else (_membership(write_BTS, carry_BTSS, state.membership[0]),)
        return StreamsState(streams_NSD.view_as(carried_BTSD), (), membership)

    def num_sources(self, site: Site) -> int:
        """Counts the streams."""
        return self.config.streams


def gate_scores(rows: Float[Tensor, "*BTS K"], projection: Float[Tensor, "G K"]) -> Float[Tensor, "*BTS G"]:
    """Projects rows divided by their root mean square, without keeping the divided rows.

    Args:
        rows: Streams, or all streams of a token as one row.
        projection: One vector for each score.

    Example:
        >>> gate_scores(torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[1.0000, 2.0000]])
    """
    scores: Tensor = _Scores.apply(rows, projection)  # type: ignore[no-untyped-call]
    return scores


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, projection: Tensor) -> Tensor:
        row = rows.to(compute_dtype(rows.dtype))
        inverse_norm = inverse_rms(row, _EPS)[..., None]
        scores = nn.functional.linear(row, projection.to(row.dtype)) * inverse_norm
        ctx.save_for_backward(rows, projection, scores, inverse_norm)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        rows, projection, scores, inverse_norm = ctx.saved_tensors
        row, dot = rows.to(scores.dtype), grad * inverse_norm  # gradient of row . projection
        through_norm = (grad * scores).sum(-1, keepdim=True) * inverse_norm.square() / rows.shape[-1]
        with without_autocast(rows.device.type):
            grad_rows = (dot @ projection.to(row.dtype)).addcmul_(row, through_norm, value=-1)
            grad_projection = dot.flatten(0, -2).T @ row.flatten(0, -2)
        return grad_rows.to(rows.dtype), grad_projection.to(projection.dtype)


def _ones(streams: Float[Tensor, "B T S D"]) -> Float[Tensor, "S B T"]:
    one = streams.new_ones((), dtype=compute_dtype(streams.dtype))
    return one.expand(streams.shape[-2], *streams.shape[:-2])


def _membership(
    write: Float[Tensor, "B T S"], carry: Float[Tensor, "B T S S"], held: Float[Tensor, "S W B T"]
) -> Float[Tensor, "S W+1 B T"]:
    """Follows the writers through one write."""
    carried_SWBT = torch.einsum("btij,jwbt->iwbt", carry.detach(), held)
    return torch.cat([carried_SWBT, write.detach().movedim(-1, 0)[:, None]], dim=1)


def _normalised_mix(weights: Tensor, values: tuple[Tensor, ...], norm: Norm) -> Tensor:
    folded = foldable(norm)
    if folded is not None:
        return weighted_mix(weights, values, *folded)
    if not torch.is_grad_enabled():
        return norm(weighted_mix(weights, values))
    # Kept for backward: weights and streams, which are alive anyway. Mix and norm are made again.
    mix: Tensor = checkpoint(
        lambda weights, *values: norm(weighted_mix(weights, values)),
        weights,
        *values,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return mix

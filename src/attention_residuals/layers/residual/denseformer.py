"""DenseFormer: after layers, learned averages over what all layers before have made."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, ShapeError, is_count
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
    ones_weights,
    unscored_read,
    writer_names,
)
from attention_residuals.ops import weighted_mix, weighted_sum
from attention_residuals.ops.depth_read import compute_dtype

__all__ = ["DenseFormer", "DenseFormerRule", "DenseFormerState"]


@dataclass(frozen=True, kw_only=True)
class DenseFormer(ResidualConfig):
    """The standard residual inside a layer, and a depth-weighted average after it.

    X_0 is the embedding, X_j what layer j makes of the average after the layer before it. The weights are
    learned numbers, the same for every token and not normalised. They start as 1 for the newest X and 0
    for the others, which is the standard model.

    Args:
        dilation: An average takes the newest X and every ``dilation``-th before it; 1 takes all.
        period: Layers from one average to the next, at most all; 1 has an average after each layer.

    Source:
        Pagliardini et al., arXiv:2402.02622.

    Example:
        >>> rule = DenseFormer(dilation=2).build(num_layers=4, width=8)
        >>> rule.source_names(Site(3, "attention"))
        ('L0', 'L2')
    """

    formula: ClassVar[str] = "h_i = sum_j a_ij x_j, x_j = h_{j-1} + its layer's outputs, a learned"
    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        for name in ("dilation", "period"):
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected="1 or more",
                    do=f"use {name}=1 for all layers",
                )

    def build(self, *, num_layers: int, width: int) -> "DenseFormerRule":
        """Makes the rule, with one parameter per average and X in it.

        Raises:
            ConfigError: A period or dilation of more layers than there are.
        """
        for name in ("dilation", "period"):
            if getattr(self, name) > num_layers:
                raise ConfigError(
                    got=f"{name}={getattr(self, name)} for {num_layers} layers, which averages nothing",
                    expected=f"at most {num_layers}",
                    do=f"use {name}=1 for all layers",
                )
        return DenseFormerRule(self, num_layers, width)


class DenseFormerState(NamedTuple):
    """The stream, and what averages take.

    Under a tap also how many times each of ``layers``, and last the stream, holds each writer's output,
    [W, B, T].
    """

    stream: Tensor
    layers: tuple[Tensor, ...]
    """The embedding and the stream after every finished layer."""
    membership: tuple[Tensor, ...] = ()


class DenseFormerRule(ResidualRule[DenseFormerState]):
    """Averages at attention sites and at the output; the average is the stream that goes on.

    Every other read takes the stream as it is. Where a tap changes an average, the changed one goes on;
    where it changes another read, only the sublayer sees that. Give the tap to every call of a pass or to
    none.
    """

    def __init__(self, config: DenseFormer, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.config = config
        self.semantics = Semantics(
            sources="cumulative", weights="learned", output_read=self.has_average(OUTPUT)
        )
        self.scalars = nn.ParameterDict(
            {
                reader_name(site): torch.eye(self.num_sources(site))[-1].clone()
                for site in self.sites()
                if self.has_average(site)
            }
        )

    def has_average(self, site: Site) -> bool:
        """Tells whether a site reads an average."""
        layers = self._layers_before(site)
        return site.kind != "mlp" and layers > 0 and layers % self.config.period == 0

    def open(self, embedding: Tensor, tap: Tap | None = None) -> DenseFormerState:
        """Starts the stream, which is the first that averages take."""
        stream = offer_write(tap, EMBEDDING, embedding)
        if tap is None:
            return DenseFormerState(stream, (stream,))
        all_WBT = ones_weights(stream)
        return DenseFormerState(stream, (stream,), (all_WBT, all_WBT))

    def read(
        self, state: DenseFormerState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], DenseFormerState]:
        """Averages where the site does, and normalises."""
        values = self._values(state, site)
        weight_SBT = self._weights(values, site)
        average = self.has_average(site)
        # An average is kept for backward, as every stream is: it goes on.
        mix = weighted_mix(weight_SBT, values) if average else state.stream
        if tap is not None:
            read = self._read(state, site, values, weight_SBT)
            changed = offer_read(tap, read)
            if changed is not None:
                read, mix = changed, weighted_sum(changed.weights, changed.values)
            if average:
                state = state._replace(membership=(*state.membership[:-1], _held(read)))
        return (norm(mix),), state._replace(stream=mix) if average else state

    def write(
        self, state: DenseFormerState, site: Site, output: Tensor, tap: Tap | None = None
    ) -> DenseFormerState:
        """Adds to the stream; after an MLP, averages will take it."""
        written = offer_write(tap, site, checked_output(output, state.stream, site))
        stream, ends_layer = state.stream + written, site.kind == "mlp"
        layers = (*state.layers, stream) if ends_layer else state.layers
        if tap is None:
            return DenseFormerState(stream, layers)
        *members, newest_WBT = state.membership
        grown_WBT = torch.cat([newest_WBT, torch.ones_like(newest_WBT[:1])])
        return DenseFormerState(stream, layers, (*members, *([grown_WBT] if ends_layer else []), grown_WBT))

    def num_sources(self, site: Site) -> int:
        """Counts what an average takes; 1 elsewhere."""
        return len(self._taken(site)) if self.has_average(site) else 1

    def source_names(self, site: Site) -> tuple[str, ...]:
        """Names what a site reads; ``L2`` is the stream after layer 2."""
        if self.has_average(site):
            return tuple(f"L{number - 1}" if number else EMBEDDING for number in self._taken(site))
        return (EMBEDDING,) if site.sublayer == 0 else ("stream",)

    def _layers_before(self, site: Site) -> int:
        return self.num_layers if site == OUTPUT else site.layer

    def _taken(self, site: Site) -> range:
        newest = self._layers_before(site)
        return range(newest % self.config.dilation, newest + 1, self.config.dilation)

    def _values(self, state: DenseFormerState, site: Site) -> tuple[Tensor, ...]:
        if len(state.layers) != 1 + self._layers_before(site):
            raise ShapeError(
                got=f"a state after {len(state.layers) - 1} layers at {site}",
                expected=f"one after {self._layers_before(site)}",
                do="let every site read and write once, in the order of sites()",
            )
        if not self.has_average(site):
            return (state.stream,)
        return tuple(state.layers[number] for number in self._taken(site))

    def _weights(self, values: tuple[Tensor, ...], site: Site) -> Float[Tensor, "S B T"]:
        if not self.has_average(site):
            return ones_weights(values[0])
        scalar_S: Tensor = self.scalars[reader_name(site)].to(compute_dtype(values[0].dtype))
        return scalar_S.view(-1, 1, 1).expand(-1, *values[0].shape[:-1])

    def _read(self, state: DenseFormerState, site: Site, values: tuple[Tensor, ...], weights: Tensor) -> Read:
        writers = writer_names(self.num_written(site))
        numbers = self._taken(site) if self.has_average(site) else (-1,)
        member_SWBT = state.membership[-1].new_zeros((len(values), len(writers), *weights.shape[1:]))
        for member_WBT, number in zip(member_SWBT, numbers, strict=True):
            held_WBT = state.membership[number]
            member_WBT[: len(held_WBT)] = held_WBT
        return unscored_read(site, self.source_names(site), values, weights, writers, member_SWBT)


def _held(read: Read) -> Tensor:
    """Counts how many times the mix of a read holds each writer's output."""
    weight_S1BT = read.weights.detach()[:, None]
    member = read.membership if read.membership.ndim == 4 else read.membership[..., None, None]
    held_WBT: Tensor = (weight_S1BT * member.to(weight_S1BT.dtype)).sum(0)
    return held_WBT

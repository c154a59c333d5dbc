"""The rules that keep sublayers' outputs, or block sums of them, and mix them anew at each site."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_residuals.errors import ConfigError, ShapeError, is_count, is_finite, nearest
from attention_residuals.layers.norm import foldable
from attention_residuals.layers.residual.interface import (
    Norm,
    ResidualConfig,
    ResidualRule,
    Semantics,
    checked_output,
    inputs_of_parts,
    to_source_dtype,
)
from attention_residuals.layers.tap import EMBEDDING, Read, Site, Tap, offer_read, offer_write, writer_names
from attention_residuals.ops import (
    DepthLogits,
    DepthRead,
    share_gradients,
    traffic,
    weighted_mix,
    weighted_sum,
)
from attention_residuals.ops.depth_read import compute_dtype

__all__ = ["DepthReader", "SourceConfig", "SourceRule", "SourceState", "read_often", "reader_name"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig(ResidualConfig):
    """Options of every rule whose sources are outputs or block sums.

    Args:
        sublayers_per_block: The paper's S. 1 is the full form: every sublayer's output is a source. With
            more, finished blocks of that many sublayers are sources by their sum, beside the open block;
            the last block may be shorter. All sublayers: their sum, with the embedding apart.
        key_eps: The eps of the norm on keys, >= 0.
        source_dtype: Dtype in which sources are kept; None keeps the embedding's.
    """

    sublayers_per_block: int = 1
    key_eps: float = 1e-6
    source_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        if not is_count(self.sublayers_per_block):
            raise ConfigError(
                got=f"sublayers_per_block={self.sublayers_per_block!r}",
                expected="1 (the full form) or more",
                do="count attention and MLP apart: a block of 2 layers has 4 sublayers",
            )
        if not is_finite(self.key_eps) or self.key_eps < 0:
            raise ConfigError(got=f"key_eps={self.key_eps!r}", expected="a number >= 0", do="1e-6 is usual")
        if self.source_dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(
                got=f"source_dtype={self.source_dtype!r}",
                expected="None, 'float32' or 'bfloat16'",
                do="None keeps the dtype of the embedding",
            )


class SourceState(NamedTuple):
    """The sources: finished blocks, the embedding first, and the open block once something is in it."""

    blocks: tuple[Tensor, ...]
    open_block: tuple[Tensor, ...] = ()


class DepthReader(nn.Module):
    """The learned part of one read: pseudo-query (zero at the start) and key gain (one at the start)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pseudo_query = nn.Parameter(torch.zeros(width))
        self.key_gain = nn.Parameter(torch.ones(width))

    def direction(self) -> Float[Tensor, " D"]:
        """Returns query times gain, in the dtype that scores are computed in."""
        dtype = compute_dtype(self.pseudo_query.dtype)
        return self.pseudo_query.to(dtype) * self.key_gain.to(dtype)


class SourceRule(ResidualRule[Any]):
    """What all rules have in common whose sources are outputs or block sums.

    A site sees the embedding, all finished blocks and the open block; the first read of a block sees
    finished blocks only, and the output read sees everything. A rule says in ``attend`` how it mixes them,
    and in ``make_reader`` what it learns for that.
    """

    semantics = Semantics(sources="increments", weights="softmax")

    def __init__(self, config: SourceConfig, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        if config.sublayers_per_block > 2 * num_layers:
            raise ConfigError(
                got=f"sublayers_per_block={config.sublayers_per_block} for {num_layers} layers",
                expected=f"at most {2 * num_layers}, all sublayers",
                do=f"use {2 * num_layers} for one block, {max(1, num_layers // 2)} for about four",
            )
        self.config = config
        self._seen = {site: (self.num_kept(site), tuple(self.visible(site))) for site in self.sites()}
        self.readers = nn.ModuleDict(
            {
                reader_name(site, part): self.make_reader(site, part)
                for site in self.sites()
                for part in self.parts(site)
            }
        )
        # The first site has one source, so its readers have no effect; they exist so that other
        # implementations' checkpoints, which have them, fit.
        for part in self.parts(first := self.sites()[0]):
            self.readers[reader_name(first, part)].requires_grad_(False)

    @abstractmethod
    def make_reader(self, site: Site, part: str) -> nn.Module:
        """Makes what one read learns."""

    @abstractmethod
    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Mixes the values, and normalises the mix where a gain is given.

        Returns:
            Mix, logits (of which ``weights_of`` makes the weights) and inverse norms.
        """

    def mix(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> Tensor:
        """Does what ``attend`` does where nobody asks for the scores: in inference, without a tap."""
        return self.attend(values, site, part, output_gain, output_eps).mix

    def mixed(
        self,
        scores: DepthLogits,
        values: tuple[Tensor, ...],
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Ends an ``attend`` that has scored the values by itself: weights, mix and norm."""
        mix = weighted_mix(self.weights_of(scores.logits), values, output_gain, output_eps)
        return DepthRead(mix, *scores)

    def values(self, state: Any, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns what is mixed: the sources themselves, in most rules."""
        return sources

    def beside(self, state: Any) -> Tensor | None:
        """Returns what is added to the mix before the norm: nothing, in most rules."""
        return None

    def open(self, embedding: Tensor, tap: Tap | None = None) -> Any:
        """Makes the embedding the first source, a block of its own."""
        source = to_source_dtype(self.config.source_dtype, embedding)
        return self.opened(offer_write(tap, EMBEDDING, source), tap)

    def opened(self, embedding: Tensor, tap: Tap | None) -> Any:
        """Starts the state with what a tap has left of the embedding."""
        return SourceState(blocks=(read_often(embedding, tap),))

    def read(
        self, state: Any, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Mixes the sources and normalises the mix, once for each part."""
        sources = self.sources(state, site)
        values, beside = self.values(state, sources), self.beside(state)
        inputs = {}
        for part in self.parts(site):
            if tap is None and not torch.is_grad_enabled():
                inputs[part] = self._normalised_mix(values, beside, site, part, norm)
                continue
            result = self._normalised_read(values, beside, site, part, norm)
            changed = None if tap is None else self._offered(sources, values, result, site, part, tap)
            inputs[part] = (
                self._like_parameters(result.mix) if changed is None else norm(self._like_parameters(changed))
            )
        return inputs_of_parts(inputs), state

    def write(self, state: Any, site: Site, output: Tensor, tap: Tap | None = None) -> Any:
        """Adds to the open block and closes it when it has its number of sublayers."""
        written = offer_write(tap, site, checked_output(output, state.blocks[0], site))
        return self.written(state, site, written, tap)

    def written(self, state: Any, site: Site, output: Tensor, tap: Tap | None) -> Any:
        """Adds what a tap has left of an output to the sources; rules with a larger state make it of them."""
        block = output
        if state.open_block:
            block = state.open_block[0] + output
            traffic.note((*state.open_block, output), (block,))
        if (site.sublayer + 1) % self.config.sublayers_per_block == 0:
            return SourceState((*state.blocks, read_often(block, tap)))
        return SourceState(state.blocks, (block,))

    def sources(self, state: Any, site: Site) -> tuple[Tensor, ...]:
        """Returns what a site sees.

        Raises:
            ConfigError: The model has no such site.
            ShapeError: Sites do not read and write in order.
        """
        if site not in self._seen:
            known = [str(own) for own in self.sites()]
            raise ConfigError(
                got=f"site {site}", expected="a site of this model", do=nearest(str(site), known)
            )
        kept, (num_kept, places) = state.blocks + state.open_block, self._seen[site]
        if len(kept) != num_kept:
            raise ShapeError(
                got=f"{len(kept)} sources at {site}",
                expected=f"{num_kept}, what the sublayers before it have written",
                do="let every site read and write once, in the order of sites()",
            )
        return kept if len(places) == num_kept else tuple(kept[number] for number in places)

    def num_kept(self, site: Site) -> int:
        """Counts the embedding, the blocks finished before the site, and the open one if there is one."""
        return 1 - (-self.num_written(site) // self.config.sublayers_per_block)

    def visible(self, site: Site) -> Sequence[int]:
        """Numbers the kept sources that a site reads: all of them, in most rules."""
        return range(self.num_kept(site))

    def num_sources(self, site: Site) -> int:
        """Counts the sources that a site reads."""
        return len(self.visible(site))

    def source_names(self, site: Site) -> tuple[str, ...]:
        """Names the sources of a site by identity.

        ``B2`` is the second finished block after the embedding, ``B3.open@L5.mlp`` the third while it is
        open, as the MLP of layer 5 left it. In the full form sources have their writers' names.

        Example:
            >>> from attention_residuals.layers.residual import AttnRes
            >>> rule = AttnRes(sublayers_per_block=4).build(num_layers=3, width=4)
            >>> rule.source_names(Site(2, "mlp"))
            ('embedding', 'B1', 'B2.open@L2.attention')
        """
        written, size = self.num_written(site), self.config.sublayers_per_block
        writers = writer_names(written)
        if size == 1:
            return tuple(writers[number] for number in self.visible(site))
        finished = tuple(f"B{number + 1}" for number in range(written // size))
        is_open = written % size != 0
        names = (EMBEDDING, *finished, *([f"B{len(finished) + 1}.open@{writers[-1]}"] if is_open else []))
        return tuple(names[number] for number in self.visible(site))

    def membership(self, site: Site) -> Float[Tensor, "S W"]:
        """Tells which writers each source of a site contains: 1 where source s has writer w in its sum."""
        written = self.num_written(site)
        member = torch.zeros(self.num_kept(site), written + 1)
        member[0, 0] = 1.0
        for sublayer in range(written):
            member[1 + sublayer // self.config.sublayers_per_block, 1 + sublayer] = 1.0
        return member[list(self.visible(site))]

    def value_membership(
        self, site: Site, sources: tuple[Tensor, ...]
    ) -> Float[Tensor, "S W"] | Float[Tensor, "S W B T"]:
        """Tells the same of the values; asked for only under a tap."""
        return self.membership(site)

    def _offered(
        self,
        sources: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        result: DepthRead,
        site: Site,
        part: str,
        tap: Tap,
    ) -> Tensor | None:
        """Offers a read to a tap; returns the mix that shall replace it, or None."""
        read = Read(
            site=site,
            part=part,
            source_names=self.source_names(site),
            sources=sources,
            values=values,
            logits=result.logits,
            weights=self.weights_of(result.logits),
            inverse_norms=result.inverse_norms,
            writers=writer_names(self.num_written(site)),
            membership=self.value_membership(site, sources),
        )
        changed = offer_read(tap, read)
        return None if changed is None else weighted_sum(changed.weights, changed.values)

    def _normalised_mix(
        self, values: tuple[Tensor, ...], beside: Tensor | None, site: Site, part: str, norm: Norm
    ) -> Tensor:
        folded = foldable(norm) if beside is None else None
        if folded is not None:
            return self._like_parameters(self.mix(values, site, part, *folded))
        mix = self.mix(values, site, part, None, None)
        return norm(self._like_parameters(mix if beside is None else beside + mix))

    def _normalised_read(
        self, values: tuple[Tensor, ...], beside: Tensor | None, site: Site, part: str, norm: Norm
    ) -> DepthRead:
        folded = foldable(norm) if beside is None else None
        if folded is not None:
            return self.attend(values, site, part, *folded)
        if not torch.is_grad_enabled():
            return self._read_then_norm(norm, site, part, beside, *values)
        # Kept for backward: the values, which are alive anyway. Mix and norm are made again.
        result: DepthRead = checkpoint(
            self._read_then_norm,
            norm,
            site,
            part,
            beside,
            *values,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return result

    def _read_then_norm(
        self, norm: Norm, site: Site, part: str, beside: Tensor | None, *values: Tensor
    ) -> DepthRead:
        result = self.attend(values, site, part, None, None)
        mix = result.mix if beside is None else beside + result.mix
        return result._replace(mix=norm(self._like_parameters(mix)))

    def _like_parameters(self, mix: Tensor) -> Tensor:
        """Gives sublayers their own dtype where sources are kept in another."""
        return mix if self.config.source_dtype is None else mix.to(next(self.parameters()).dtype)


def read_often(source: Tensor, tap: Tap | None) -> Tensor:
    """Lets the reads of a source share one gradient, unless a tap may ask for the gradient of a source."""
    return source if tap is not None else share_gradients(source)


@functools.cache
def reader_name(site: Site, part: str = "in") -> str:
    """Names a read's module, whose name cannot hold a dot.

    Example:
        >>> reader_name(Site(3, "attention")), reader_name(Site(3, "attention"), "v")
        ('L3_attention', 'L3_attention_v')
    """
    name = str(site).replace(".", "_")
    return name if part == "in" else f"{name}_{part}"

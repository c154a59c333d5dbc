"""Attention residuals: each site attends over the outputs of earlier sublayers or over block sums of them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_residuals.errors import ConfigError, ShapeError, is_count, nearest
from attention_residuals.layers.norm import foldable
from attention_residuals.layers.residual.interface import (
    Norm,
    ResidualConfig,
    ResidualRule,
    checked_output,
    to_source_dtype,
)
from attention_residuals.layers.tap import EMBEDDING, Read, Site, Tap, offer_read, offer_write, writer_names
from attention_residuals.ops import DepthRead, depth_attention, share_gradients, weighted_sum

__all__ = ["AttnRes", "AttnResRule", "AttnResState", "DepthReader"]


@dataclass(frozen=True, kw_only=True)
class AttnRes(ResidualConfig):
    """Softmax attention over depth.

    Args:
        sublayers_per_block: The paper's S. 1 is the full form: every sublayer's output is a source. With
            more, finished blocks of that many sublayers are sources by their sum, beside the open block;
            the last block may be shorter. At least all sublayers: the sum, with the embedding apart.
        key_eps: The eps of the norm on keys, >= 0.
        source_dtype: Dtype in which sources are kept; None keeps the embedding's.

    Source:
        Attention Residuals (arXiv:2603.15031), sections 3.1 and 3.2.

    Example:
        >>> rule = AttnRes(sublayers_per_block=4).build(num_layers=8, width=16)
        >>> [rule.num_sources(site) for site in rule.sites()]
        [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5]
    """

    sublayers_per_block: int
    key_eps: float = 1e-6
    source_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        if not is_count(self.sublayers_per_block):
            raise ConfigError(
                got=f"sublayers_per_block={self.sublayers_per_block!r}",
                expected="1 (the full form) or more",
                do="count attention and MLP apart: a block of 2 layers has 4 sublayers",
            )
        if not self.key_eps >= 0:
            raise ConfigError(got=f"key_eps={self.key_eps}", expected=">= 0", do="1e-6 is usual")
        if self.source_dtype not in (None, "float32", "bfloat16"):
            raise ConfigError(
                got=f"source_dtype={self.source_dtype!r}",
                expected="None, 'float32' or 'bfloat16'",
                do="None keeps the dtype of the embedding",
            )

    def build(self, *, num_layers: int, width: int) -> "AttnResRule":
        """Makes the rule, with 2 D parameters per site."""
        return AttnResRule(self, num_layers, width)


class AttnResState(NamedTuple):
    """The sources: finished blocks, the embedding first, and the open block once something is in it."""

    blocks: tuple[Tensor, ...]
    open_block: tuple[Tensor, ...] = ()


class DepthReader(nn.Module):
    """The learned part of one site: pseudo-query (zero at the start) and key gain (one at the start)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pseudo_query = nn.Parameter(torch.zeros(width))
        self.key_gain = nn.Parameter(torch.ones(width))


class AttnResRule(ResidualRule[AttnResState]):
    """Full (``sublayers_per_block=1``) and Block attention residuals.

    A site reads the embedding, all finished blocks and the open block; the first read of a block sees
    finished blocks only, and the output read sees everything. The mix replaces the residual stream.
    ``backend`` may be set to any name that ``depth_attention`` takes.

    Source:
        Attention Residuals (arXiv:2603.15031), equations 1 to 6; output read as in Kimi K3
        (arXiv:2607.24653).
    """

    def __init__(self, config: AttnRes, num_layers: int, width: int) -> None:
        super().__init__(num_layers, width)
        self.config = config
        self.backend = "auto"
        self.readers = nn.ModuleDict({_key(site): DepthReader(width) for site in self.sites()})
        # The first site has one source, so its reader has no effect; it exists so that other
        # implementations' checkpoints, which have it, fit.
        self.readers[_key(Site(0, "attention"))].requires_grad_(False)

    def open(self, embedding: Tensor, tap: Tap | None = None) -> AttnResState:
        """Makes the embedding the first source, a block of its own."""
        source = to_source_dtype(self.config.source_dtype, embedding)
        return AttnResState(blocks=(_read_often(offer_write(tap, EMBEDDING, source), tap),))

    def read(
        self, state: AttnResState, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Tensor, ...], AttnResState]:
        """Attends over the sources and normalises the mix."""
        if _key(site) not in self.readers:
            known = [str(own) for own in self.sites()]
            raise ConfigError(
                got=f"site {site}", expected="a site of this model", do=nearest(str(site), known)
            )
        sources = state.blocks + state.open_block
        self._require_order(len(sources), site)
        reader = self.readers[_key(site)]
        assert isinstance(reader, DepthReader)
        result = self._normalised_read(sources, reader, norm)
        if tap is not None:
            changed = offer_read(
                tap,
                Read(
                    site=site,
                    part="in",
                    source_names=self.source_names(site),
                    sources=sources,
                    values=sources,
                    logits=result.logits,
                    weights=result.weights,
                    inverse_norms=result.inverse_norms,
                    writers=writer_names(self.num_written(site)),
                    membership=self.membership(site),
                ),
            )
            if changed is not None:
                return (
                    norm(self._like_reader(weighted_sum(changed.weights, changed.values), reader)),
                ), state
        return (self._like_reader(result.mix, reader),), state

    def write(self, state: AttnResState, site: Site, output: Tensor, tap: Tap | None = None) -> AttnResState:
        """Adds to the open block and closes it when it has its number of sublayers."""
        written = offer_write(tap, str(site), checked_output(output, state.blocks[0], site))
        block = state.open_block[0] + written if state.open_block else written
        if (site.sublayer + 1) % self.config.sublayers_per_block == 0:
            return AttnResState((*state.blocks, _read_often(block, tap)))
        return AttnResState(state.blocks, (block,))

    def num_sources(self, site: Site) -> int:
        """Counts the embedding, the blocks finished before the site, and the open one if there is one."""
        return 1 - (-self.num_written(site) // self.config.sublayers_per_block)

    def source_names(self, site: Site) -> tuple[str, ...]:
        """Names the sources of a site by identity.

        ``B2`` is the second finished block after the embedding, ``B3.open@L5.mlp`` the third while it is
        open, as the MLP of layer 5 left it. In the full form sources have their writers' names.

        Example:
            >>> rule = AttnRes(sublayers_per_block=4).build(num_layers=3, width=4)
            >>> rule.source_names(Site(2, "mlp"))
            ('embedding', 'B1', 'B2.open@L2.attention')
        """
        written, size = self.num_written(site), self.config.sublayers_per_block
        writers = writer_names(written)
        if size == 1:
            return writers
        finished = tuple(f"B{number + 1}" for number in range(written // size))
        is_open = written % size != 0
        return (EMBEDDING, *finished, *([f"B{len(finished) + 1}.open@{writers[-1]}"] if is_open else []))

    def membership(self, site: Site) -> Float[Tensor, "S W"]:
        """Tells which writers each source of a site contains: 1 where source s has writer w in its sum."""
        written = self.num_written(site)
        member = torch.zeros(self.num_sources(site), written + 1)
        member[0, 0] = 1.0
        for sublayer in range(written):
            member[1 + sublayer // self.config.sublayers_per_block, 1 + sublayer] = 1.0
        return member

    def _require_order(self, num_sources: int, site: Site) -> None:
        if num_sources != self.num_sources(site):
            raise ShapeError(
                got=f"{num_sources} sources at {site}",
                expected=f"{self.num_sources(site)}, what the sublayers before it have written",
                do="let every site read and write once, in the order of sites()",
            )

    def _normalised_read(self, sources: tuple[Tensor, ...], reader: DepthReader, norm: Norm) -> DepthRead:
        folded = foldable(norm)
        if folded is not None:
            return self._depth_attention(sources, reader, *folded)
        if not torch.is_grad_enabled():
            return self._read_then_norm(norm, reader, *sources)
        # Kept for backward: the sources, which are alive anyway. Mix and norm are made again.
        result: DepthRead = checkpoint(
            self._read_then_norm, norm, reader, *sources, use_reentrant=False, preserve_rng_state=False
        )
        return result

    def _read_then_norm(self, norm: Norm, reader: DepthReader, *sources: Tensor) -> DepthRead:
        result = self._depth_attention(sources, reader, None, None)
        return result._replace(mix=norm(self._like_reader(result.mix, reader)))

    def _like_reader(self, mix: Tensor, reader: DepthReader) -> Tensor:
        """Gives sublayers their own dtype where sources are kept in another."""
        return mix if self.config.source_dtype is None else mix.to(reader.pseudo_query.dtype)

    def _depth_attention(
        self, sources: tuple[Tensor, ...], reader: DepthReader, gain: Tensor | None, eps: float | None
    ) -> DepthRead:
        return depth_attention(
            sources,
            reader.pseudo_query,
            reader.key_gain,
            eps=self.config.key_eps,
            output_gain=gain,
            output_eps=eps,
            backend=self.backend,
        )


def _read_often(source: Tensor, tap: Tap | None) -> Tensor:
    """Lets the reads of a source share one gradient, unless a tap may ask for the gradient of a source."""
    return source if tap is not None else share_gradients(source)


def _key(site: Site) -> str:
    """Module names cannot hold a dot."""
    return str(site).replace(".", "_")

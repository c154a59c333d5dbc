"""Depth attention over cumulative states, as open-attention-residuals has it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, is_finite
from attention_residuals.layers.residual.interface import Semantics
from attention_residuals.layers.residual.sources import (
    DepthReader,
    SourceConfig,
    SourceRule,
    SourceState,
    read_often,
    reader_name,
)
from attention_residuals.layers.tap import EMBEDDING, OUTPUT, Site, Tap
from attention_residuals.ops import DepthRead, depth_attention, weighted_mix

__all__ = ["Cumulative", "CumulativeRule"]


@dataclass(frozen=True, kw_only=True)
class Cumulative(SourceConfig):
    """Softmax attention over snapshots of a residual stream that is never reset.

    Not the paper's method, though checkpoints of it are published under that name: every source contains
    the ones before it, a learned bias favours the newest, and the output reads the stream itself. Right
    after a snapshot, and at the first site, two sources are the same tensor, so that the split of weight
    between them means nothing: read the writer weights.

    Args:
        recency_bias: Start of the learned number that is added to the newest source's score.

    Source:
        The repository wdlctc/open-attention-residuals.

    Example:
        >>> Cumulative(sublayers_per_block=2).build(num_layers=2, width=8).source_names(Site(1, "mlp"))
        ('embedding', 'through B1', 'stream')
    """

    formula: ClassVar[str] = (
        "h = sum_s softmax_s(w . (g * c_s) / rms(c_s) + b [s newest]) c_s, c_s = v_0 + ... + v_s"
    )
    sublayers_per_block: int = 2
    recency_bias: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_finite(self.recency_bias):
            raise ConfigError(
                got=f"recency_bias={self.recency_bias!r}",
                expected="a finite number",
                do="3.0 is the repository's default, 0.0 favours no source",
            )

    def build(self, *, num_layers: int, width: int) -> "CumulativeRule":
        """Makes the rule, with 2 D + 1 parameters per site and none at the output."""
        return CumulativeRule(self, num_layers, width)


class BiasedReader(DepthReader):
    """A reader that favours the newest source."""

    def __init__(self, width: int, recency_bias: float) -> None:
        super().__init__(width)
        self.recency_bias = nn.Parameter(torch.full((1,), recency_bias))


class CumulativeRule(SourceRule):
    """Reads snapshots of the stream and the stream."""

    config: Cumulative
    semantics = Semantics(sources="cumulative", weights="softmax", biased=True, output_read=False)

    def make_reader(self, site: Site, part: str) -> nn.Module:
        """Makes pseudo-query, key gain and bias; the output reads the stream, and learns nothing."""
        return nn.Module() if site == OUTPUT else BiasedReader(self.width, self.config.recency_bias)

    def opened(self, embedding: Tensor, tap: Tap | None) -> SourceState:
        """Starts the stream, with a snapshot of it."""
        source = read_often(embedding, tap)
        return SourceState((source,), (source,))

    def written(self, state: Any, site: Site, output: Tensor, tap: Tap | None) -> SourceState:
        """Adds to the stream, and takes a snapshot at the end of a block."""
        stream = read_often(state.open_block[0] + output, tap)
        closes = (site.sublayer + 1) % self.config.sublayers_per_block == 0
        return SourceState((*state.blocks, stream) if closes else state.blocks, (stream,))

    def num_kept(self, site: Site) -> int:
        """Counts the snapshots and the stream."""
        return 2 + self.num_written(site) // self.config.sublayers_per_block

    def visible(self, site: Site) -> range:
        """Numbers what a site reads: all, but at the output the stream alone."""
        kept = self.num_kept(site)
        return range(kept - 1, kept) if site == OUTPUT else range(kept)

    def source_names(self, site: Site) -> tuple[str, ...]:
        """Names the snapshots by the last block in them."""
        blocks = range(1, self.num_kept(site) - 1)
        names = (EMBEDDING, *(f"through B{block}" for block in blocks), "stream")
        return tuple(names[number] for number in self.visible(site))

    def membership(self, site: Site) -> Float[Tensor, "S W"]:
        """Tells which writers each source contains: all up to its end."""
        written, size = self.num_written(site), self.config.sublayers_per_block
        ends = torch.tensor([*(size * number for number in range(self.num_kept(site) - 1)), written])
        member_SW = (torch.arange(written + 1) <= ends[:, None]).float()
        return member_SW[list(self.visible(site))]

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Attends with the bias."""
        tokens = values[0].shape[:-1]
        reader = self.readers[reader_name(site, part)]
        if not isinstance(reader, BiasedReader):
            zeros_SBT = values[0].new_zeros((1, *tokens), dtype=torch.float32)
            mix = weighted_mix(zeros_SBT + 1, values, output_gain, output_eps)
            return DepthRead(mix, zeros_SBT, zeros_SBT + 1)
        older = reader.recency_bias.new_zeros(len(values) - 1)
        bias_S = torch.cat([older, reader.recency_bias])
        return depth_attention(
            values,
            reader.pseudo_query,
            reader.key_gain,
            eps=self.config.key_eps,
            logit_bias=bias_S.view(-1, *[1] * len(tokens)).expand(-1, *tokens),
            output_gain=output_gain,
            output_eps=output_eps,
        )

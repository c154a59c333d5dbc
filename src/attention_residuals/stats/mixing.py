"""The depth mixing matrix: how many times each read holds each writer's output, for any residual rule."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.ops.eager import without_autocast
from attention_residuals.stats.routing import Routing
from attention_residuals.trace import SiteTrace, Trace

__all__ = ["MixingMatrix", "mixing_matrix", "semiseparable_order", "writer_weights"]


class MixingMatrix(NamedTuple):
    """M of the unified view: the state at read r is the sum over writers w of ``weights[r, w]`` times output w.

    A weight is 0 where the writer has not written yet or cannot be seen. The last axis P is there where a
    site has several reads (q, k, v) or groups of channels have weights apart; ``parts`` names them. Where
    only some sites have several reads, the one read of the others is repeated.
    """

    reads: tuple[str, ...]
    writers: tuple[str, ...]
    parts: tuple[str, ...]
    weights: Float[Tensor, "R W B T"] | Float[Tensor, "R W B T P"]

    def average(self, trace: Trace, *, part: str | None = None) -> Routing:
        """Averages over all real tokens of the trace, for pictures; NaN where nothing can be read.

        Args:
            trace: The trace that the matrix is from.
            part: One of ``parts``; by default the mean over them.

        Raises:
            ConfigError: There is no such part.
        """
        if part is not None and part not in self.parts:
            raise ConfigError(
                got=f"part {part!r}", expected=f"one of {self.parts} or None", do="leave it out for the mean"
            )
        weights = self.weights
        if self.parts:
            weights = weights.mean(-1) if part is None else weights[..., self.parts.index(part)]
        average = weights[:, :, trace.real].mean(-1)
        written = torch.arange(len(self.writers)) <= torch.arange(len(self.reads))[:, None]
        average = average.masked_fill(~written, torch.nan)
        return Routing(self.reads, self.writers, average, torch.zeros_like(average, dtype=torch.bool))


def mixing_matrix(trace: Trace) -> MixingMatrix:
    """Computes the depth mixing matrix of a forward pass.

    All ones below the diagonal for the standard residual; rows of sum 1 for Full attention residuals and
    Highway; a block's weight at each of its writers for Block attention residuals; the unrolled recurrence
    for DenseFormer and hyper-connections. Normalised values carry their 1/rms. NaN where a tap has put values
    in place of which nobody knows who wrote them.

    Args:
        trace: A recorded pass of a model with any residual rule.

    Returns:
        Reads in the order in which sites read, writers in the order in which they write.

    Source:
        Attention Residuals (arXiv:2603.15031), section 6.2.

    Example:
        >>> from attention_residuals import Decoder, StandardResidual, presets, record
        >>> model = Decoder(presets.scaled(2, vocab_size=9, residual=StandardResidual()))
        >>> mixing_matrix(record(model, torch.tensor([[5]]))).weights[:, :, 0, 0].int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    reads = tuple(dict.fromkeys(site.site for site in trace.sites))
    writers = trace.sites[-1].writers
    by_read = {read: [site for site in trace.sites if site.site == read] for read in reads}
    parts = _parts(trace)
    rows = []
    for read in reads:
        row = _row(by_read[read], parts)
        rows.append(torch.cat([row, row.new_zeros(len(writers) - len(row), *row.shape[1:])]))
    dtype = max((row.dtype for row in rows), key=lambda dtype: dtype.itemsize)
    weights = torch.stack([row.to(dtype) for row in rows])
    return MixingMatrix(reads, writers, parts, weights if parts else weights.squeeze(-1))


def writer_weights(site: SiteTrace) -> Float[Tensor, "W B T"] | Float[Tensor, "W B T H"]:
    """Computes how many times one read holds each writer's output: its weights through its membership.

    Any number; 0: not at all, 1: as in the standard residual, below 0: taken away.
    """
    dtype = torch.promote_types(site.weights.dtype, site.membership.dtype)
    pattern = "sw,sbt...->wbt..." if site.membership.ndim == 2 else "swbt,sbt...->wbt..."
    with without_autocast(site.weights.device.type):
        result: Tensor = torch.einsum(pattern, site.membership.to(dtype), site.weights.to(dtype))
    return result


def semiseparable_order(weights: Float[Tensor, "R W"], *, tolerance: float = 1e-6) -> int:
    """Returns the largest rank of any submatrix of rows from r on and columns up to the newest writer at r.

    It counts the numbers (times D) that must be carried through depth to compute all reads one after the
    other: 1 for the standard residual, at most m for hyper-connections with m streams, at most N + 1 for N
    blocks, as many as there are writers for Full attention residuals.

    Args:
        weights: M of one token; row r may hold writers 0 to r.
        tolerance: Singular values below this share of the submatrix's largest count as zero.

    Source:
        Attention Residuals (arXiv:2603.15031), section 6.2.

    Example:
        >>> semiseparable_order(torch.ones(4, 4).tril()), semiseparable_order(torch.eye(4))
        (1, 1)
    """
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise ConfigError(
            got=f"weights of shape {list(weights.shape)}",
            expected="one token's mixing matrix [R, W] with as many reads as writers",
            do="take weights[:, :, row, token]",
        )
    ranks = []
    for row in range(len(weights)):
        values = torch.linalg.svdvals(weights[row:, : row + 1].double())
        ranks.append(int((values > tolerance * values[0].clamp_min(1e-300)).sum()))
    return max(ranks)


def _parts(trace: Trace) -> tuple[str, ...]:
    """Names the last axis: the reads of attention sites, or groups of channels; empty where there is one."""
    first = trace.sites[0]
    own = tuple(site.part for site in trace.sites if site.site == first.site)
    if len(own) > 1:
        return own
    heads = first.weights.shape[3:]
    return tuple(f"head {number}" for number in range(heads[0])) if heads else ()


def _row(reads: list[SiteTrace], parts: tuple[str, ...]) -> Float[Tensor, "W B T P"]:
    rows = [writer_weights(read) for read in reads]
    if rows[0].ndim == 4:
        return rows[0]
    stacked = torch.stack(rows, dim=-1)
    return stacked if len(rows) > 1 else stacked.expand(*stacked.shape[:-1], max(1, len(parts)))

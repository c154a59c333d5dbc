"""Routing of any number of tokens in constant memory: a tap that adds up and keeps no token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, TapError, nearest
from attention_residuals.layers.tap import Pass, Read, Write
from attention_residuals.trace.reads import kept, kept_norms, kept_read, real_of
from attention_residuals.trace.site import SiteTrace
from attention_residuals.trace.texts import special_tokens
from attention_residuals.trace.trace import Trace

__all__ = ["BINS", "SiteSummary", "Summary"]

BINS = 20
"""Of the histograms of weights, between 0 and 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteSummary:
    """One read over all tokens that a ``Summary`` has seen. Duplicate sources are one.

    Args:
        name: Of the read.
        source_names: By identity, as in the first batch.
        num_tokens: Real tokens.
        weights: Mean weights, groups of channels averaged.
        variances: Their variances over tokens, >= 0.
        histogram: How many tokens have a weight in each of 20 equal bins from 0 to 1; those outside are counted
            in the bin at their end.
        shares: Mean of weights without their signs over their sum; the mean weights under a softmax.
        share_variances: Their variances, at most shares (1 - shares).
        norm_shares: Mean shares of the contributions' lengths.
        projections: Mean shares along the state, any number; they sum to 1.
        entropy: Mean entropy of the shares in nats, 0 to ln S; NaN where there is one source.
    """

    name: str
    source_names: tuple[str, ...]
    num_tokens: int
    weights: Float[Tensor, " S"]
    variances: Float[Tensor, " S"]
    histogram: Int[Tensor, "S bins"]
    shares: Float[Tensor, " S"]
    share_variances: Float[Tensor, " S"]
    norm_shares: Float[Tensor, " S"]
    projections: Float[Tensor, " S"]
    entropy: float

    @property
    def normalised_entropy(self) -> float:
        """Mean entropy over that of equal shares: 0 for one source at each token, 1 for all alike."""
        return self.entropy / math.log(len(self.source_names)) if len(self.source_names) > 1 else math.nan


class Summary:
    """A tap that adds up what every site reads, over any number of passes, and keeps no token.

    Give the same one to pass after pass. Padding is left out by the passes' masks, special tokens where a
    tokenizer tells them. ``add`` takes a trace instead of a pass: the numbers are the same.

    Args:
        tokenizer: Knows special tokens.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model, summary = Decoder(presets.scaled(2, vocab_size=300)), Summary()
        >>> for start in range(3):
        ...     with torch.no_grad():
        ...         _ = model(torch.tensor([[start, 6, 7]]), tap=summary)
        >>> summary.num_tokens, summary["L0.mlp"].weights.tolist()
        (9, [0.5, 0.5])
    """

    def __init__(self, *, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._sites: dict[str, _Sums] = {}
        self._mask: Tensor | None = None
        self._real: Tensor | None = None
        self.num_tokens = 0

    def begin(self, run: Pass) -> None:
        """Notes which tokens of a pass count."""
        self._mask = real_of(run)
        real = torch.ones(run.tokens.shape, dtype=torch.bool) if self._mask is None else self._mask
        if self._tokenizer is not None:
            real = real & ~special_tokens(kept(run.tokens), self._tokenizer)
        self._real = real
        self.num_tokens += int(real.sum())

    def read(self, read: Read) -> Read:
        """Adds a read.

        Raises:
            NonFiniteError: NaN or infinity at a real token.
            TapError: No pass has begun, or the sources are not those of the passes before.
        """
        if self._real is None:
            raise TapError(
                got=f"a read at {read.site} outside of a pass",
                expected="tap.begin before the first read",
                do="a model of your own calls tap.begin(Pass(...)) first",
            )
        self._add(kept_read(read, self._mask, values=False), self._real)
        return read

    def write(self, write: Write) -> Write:
        """Checks an output, and lets it pass.

        Raises:
            NonFiniteError: NaN or infinity at a real token.
        """
        kept_norms(write, self._mask)
        return write

    def add(self, trace: Trace) -> "Summary":
        """Adds all real tokens of a trace, and returns the summary.

        Raises:
            TapError: The sources are not those of the passes before.
        """
        self.num_tokens += int(trace.real.sum())
        for site in trace:
            self._add(site, trace.real)
        return self

    def __getitem__(self, name: str) -> SiteSummary:
        """Returns a read by name.

        Raises:
            ConfigError: There is no such read.
        """
        if name not in self._sites:
            raise ConfigError(
                got=f"site {name!r}", expected="a site of this summary", do=nearest(name, self._sites)
            )
        return self._sites[name].told(name)

    def __iter__(self) -> Iterator[SiteSummary]:
        return (sums.told(name) for name, sums in self._sites.items())

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, name: object) -> bool:
        return name in self._sites

    def __repr__(self) -> str:
        """Shows mean weights and their standard deviations, a site a line."""
        lines = [f"depth routing, {len(self)} sites, mean of {self.num_tokens} tokens (standard deviation)"]
        for site in self:
            deviations = site.variances.sqrt()
            shown = sorted(torch.topk(site.weights, min(9, len(site.weights))).indices.tolist())
            cells = (f"{site.source_names[s]} {site.weights[s]:.2f} ({deviations[s]:.2f})" for s in shown)
            left = len(site.weights) - len(shown)
            lines.append(f"{site.name:<14} {'  '.join(cells)}{f'  ({left} more)' if left else ''}")
        return "\n".join(lines)

    @property
    def num_bytes(self) -> int:
        """The memory that its sums take; it does not grow with the number of tokens."""
        return sum(sums.num_bytes for sums in self._sites.values())

    def _add(self, site: SiteTrace, real: Bool[Tensor, "B T"]) -> None:
        distinct = site.distinct()
        if site.name not in self._sites:
            self._sites[site.name] = _Sums(site.same_as, distinct.source_names)
        sums = self._sites[site.name]
        if (sums.same_as, len(sums.source_names)) != (site.same_as, len(distinct.source_names)):
            raise TapError(
                got=f"{len(distinct.source_names)} distinct sources at {site.name}: {distinct.source_names}",
                expected=f"those of the tokens before: {sums.source_names}",
                do="make a Summary for each model, and for each set of edits that act on it",
            )
        sums.add(distinct, real)


class _Sums:
    """What is added up at one read."""

    def __init__(self, same_as: tuple[int, ...], source_names: tuple[str, ...]) -> None:
        self.same_as, self.source_names = same_as, source_names
        count = len(source_names)
        self.moments = _Moments(4 * count + 1)
        self.histogram = torch.zeros(count, BINS, dtype=torch.long)

    @property
    def num_bytes(self) -> int:
        return self.histogram.nbytes + self.moments.mean.nbytes + self.moments.squares.nbytes

    def add(self, site: SiteTrace, real: Bool[Tensor, "B T"]) -> None:
        weights, shares = site.token_weights[:, real], site.weight_shares[:, real]
        entropy = torch.special.entr(shares).sum(0)
        others = (site.norm_shares[:, real], site.projections[:, real])
        self.moments.add(torch.cat([weights, shares, *others, entropy[None]]).double())
        bins = (weights * BINS).long().clamp(0, BINS - 1)
        self.histogram.scatter_add_(1, bins, torch.ones_like(bins))

    def told(self, name: str) -> SiteSummary:
        count = len(self.source_names)
        weights, shares, norm_shares, projections, _ = self.moments.mean.split([count] * 4 + [1])
        variances, share_variances, *_ = self.moments.variance.split([count] * 4 + [1])
        return SiteSummary(
            name=name,
            source_names=self.source_names,
            num_tokens=self.moments.count,
            weights=weights.clone(),
            variances=variances,
            histogram=self.histogram.clone(),
            shares=shares.clone(),
            share_variances=share_variances,
            norm_shares=norm_shares.clone(),
            projections=projections.clone(),
            entropy=self.moments.mean[-1].item() if count > 1 else math.nan,
        )


class _Moments:
    """Mean and variance of K numbers over a stream of tokens, in float64.

    Source:
        Chan, Golub, LeVeque (1979): updating formulae and a pairwise algorithm for sample variances.
    """

    def __init__(self, count: int) -> None:
        self.count = 0
        self.mean = torch.full((count,), math.nan, dtype=torch.float64)
        self.squares = torch.full((count,), math.nan, dtype=torch.float64)

    @property
    def variance(self) -> Float[Tensor, " K"]:
        return self.squares / self.count if self.count else self.squares.clone()

    def add(self, batch: Float[Tensor, "K N"]) -> None:
        added = batch.shape[1]
        if not added:
            return
        mean = batch.mean(1)
        squares = (batch - mean[:, None]).square().sum(1)
        if self.count:
            total, gap = self.count + added, mean - self.mean
            squares = self.squares + squares + gap.square() * (self.count * added / total)
            mean = self.mean + gap * (added / total)
        self.count, self.mean, self.squares = self.count + added, mean, squares

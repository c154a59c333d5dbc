"""A trace: the depth routing of one forward pass, by name, on disk and back with the same bits."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import CheckpointError, ConfigError, nearest
from attention_residuals.trace.site import SiteTrace, same
from attention_residuals.trace.storage import read_trace, write_trace
from attention_residuals.trace.table import Row, as_html, dataset, frame, rows_of

__all__ = ["Trace", "routing_table"]

_OPTIONAL = ("mask", "special", "writes")
_EXPERTS = "experts."


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The depth routing of one forward pass.

    Its length is the number of reads, which iteration gives in order. Two traces are equal when all of
    their names, numbers and dtypes are.

    Args:
        sites: In the order in which they read.
        tokens: The ids that ran.
        positions: Their absolute positions.
        mask: True for real tokens, False for padding; None when nobody said that there was any. A batch
            that was padded without a mask cannot be told from a longer text, but for ``record`` with a tokenizer.
        special: True for special tokens, such as the end of a text, by their ids; None without a tokenizer.
        token_texts: Each token as text, row by row; empty when no tokenizer was given.
        writer_norms: L2 norms of what each writer wrote, in the order of ``writers``.
        writes: What each writer wrote; None unless it was asked for.
        width: D of the model.
        kinds: What each sublayer is, by writer, where they differ (KDA, MLA, MLP or MoE in Kimi Linear).
        experts: The experts that each token was sent to, by writer, where there are some. A choice of experts
            is no choice of sources: it says who computes, not what is read.
        num_experts: How many there are to choose from, by writer.
        rule: The residual rule's config, as JSON holds it.
        semantics: What the rule's sources and weights are (``layers.residual.Semantics``), as JSON holds it.
        about: Versions, dtype, checkpoint and whatever else says where the trace comes from.
    """

    sites: tuple[SiteTrace, ...]
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"] | None
    special: Bool[Tensor, "B T"] | None = None
    token_texts: tuple[tuple[str, ...], ...] = ()
    writer_norms: Float[Tensor, "W B T"]
    writes: Float[Tensor, "W B T D"] | None = None
    width: int
    kinds: dict[str, str] = field(default_factory=dict)
    experts: dict[str, Int[Tensor, "B T X"]] = field(default_factory=dict)
    num_experts: dict[str, int] = field(default_factory=dict)
    rule: dict[str, Any]
    semantics: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, site: str) -> SiteTrace:
        """Returns a read by name, such as ``"L3.attention"``, ``"L3.attention.v"`` or ``"output"``.

        Of a site that reads several times, the site's name alone is its first read.

        Raises:
            ConfigError: There is no such site.
        """
        for candidate in self.sites:
            if site in (candidate.name, candidate.site):
                return candidate
        names = [candidate.name for candidate in self.sites]
        raise ConfigError(got=f"site {site!r}", expected="a site of this trace", do=nearest(site, names))

    def __iter__(self) -> Iterator[SiteTrace]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __contains__(self, site: object) -> bool:
        """Tells whether there is a read of that name."""
        return any(site in (candidate.name, candidate.site) for candidate in self.sites)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return all(same(getattr(self, name.name), getattr(other, name.name)) for name in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Shows the average routing as a table, a site a line."""
        return routing_table(self)

    def _repr_html_(self) -> str:
        """Shows the same in a notebook, and the first tokens of the first texts."""
        title, rows = _table(self, None, 9)
        texts = [" ".join(row[:64]) + (" ..." if len(row) > 64 else "") for row in self.token_texts[:4]]
        return as_html(title, self.cautions, rows, texts)

    @property
    def writers(self) -> tuple[str, ...]:
        """Everyone who wrote before the last read, in order."""
        return self.sites[-1].writers

    @property
    def real(self) -> Bool[Tensor, "B T"]:
        """The tokens that averages are over: neither padding nor special."""
        real = torch.ones_like(self.tokens, dtype=torch.bool) if self.mask is None else self.mask
        return real if self.special is None else real & ~self.special

    @property
    def num_bytes(self) -> int:
        """The memory that its tensors take."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def cautions(self) -> tuple[str, ...]:
        """What to bear in mind when reading the weights of this rule, a sentence each."""
        semantics = self.semantics
        several = any(len(site.source_names) > 1 for site in self.sites)
        doubled = [site.name for site in self.sites if site.has_duplicates]
        facts = {
            "sources are cumulative, a writer is in several of them: read the writer weights (mixing_matrix)": (
                semantics["sources"] == "cumulative" and several
            ),
            "a learned bias favours the newest source": semantics["biased"],
            "the output has no weights of its own": not semantics["output_read"] and several,
            "values are normalised, a weight is not a share of its source": semantics["values"]
            == "normalised",
            f"at {len(doubled)} reads ({', '.join(doubled[:3])}{', ...' if len(doubled) > 3 else ''}) two "
            "sources are the same, how weight is split between them means nothing: statistics add it": doubled,
        }
        return tuple(sentence for sentence, holds in facts.items() if holds)

    def to_pandas(self) -> Any:
        """Returns a pandas.DataFrame with a line for each site, source and token.

        Columns: site, part, source, row, position, token_id, token, real (neither padding nor special),
        weight, logit (NaN for rules without), norm_share and projection_share. Groups of channels with
        weights apart are averaged.

        Raises:
            ConfigError: pandas is not installed.
        """
        return frame(self.sites, self.tokens, self.positions, self.real, self.token_texts)

    def to_xarray(self) -> Any:
        """Returns an xarray.Dataset with the numbers of ``to_pandas`` on axes read, source, row and token.

        A block has one place on the source axis, open or finished; NaN where a read has no such source.

        Raises:
            ConfigError: xarray is not installed.
        """
        return dataset(self.sites, self.tokens, self.positions, self.real, self.token_texts)

    def save(self, folder: Path | str) -> None:
        """Writes trace.json and trace.safetensors into a folder that holds no trace yet.

        Raises:
            CheckpointError: There is a trace already, or the folder cannot be written.
        """
        description = {
            "sites": [site.description() for site in self.sites],
            "token_texts": self.token_texts,
            "width": self.width,
            "kinds": self.kinds,
            "num_experts": self.num_experts,
            "rule": self.rule,
            "semantics": self.semantics,
            "about": self.about,
        }
        write_trace(Path(folder), description, self._tensors())

    @classmethod
    def load(cls, folder: Path | str) -> "Trace":
        """Reads a trace back.

        Raises:
            CheckpointError: Missing, damaged, or written by an older or a newer version.
        """
        description, tensors = read_trace(Path(folder))
        try:
            return cls._restored(description, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                got=f"{Path(folder) / 'trace.json'}: {error!r}",
                expected="the trace.json that was saved with trace.safetensors",
                do="the file is damaged: copy it again, or record the trace again",
            ) from error

    @classmethod
    def _restored(cls, description: dict[str, Any], tensors: dict[str, Tensor]) -> "Trace":
        sites = []
        for number, about in enumerate(description["sites"]):
            start = f"{number}."
            own = {name[len(start) :]: tensors[name] for name in tensors if name.startswith(start)}
            sites.append(SiteTrace.restored(about, own))
        if not sites or len(sites[-1].writers) != len(tensors["writer_norms"]):
            raise ValueError(f"{len(sites)} sites for {len(tensors['writer_norms'])} writers")
        kinds, num_experts = description.get("kinds", {}), description.get("num_experts", {})
        experts = {
            name.removeprefix(_EXPERTS): tensor
            for name, tensor in tensors.items()
            if name.startswith(_EXPERTS)
        }
        if experts.keys() != num_experts.keys():
            raise ValueError(f"{len(experts)} choices of experts for {len(num_experts)} sublayers")
        for name, kind in (("width", int), ("rule", dict), ("semantics", dict), ("about", dict)):
            if type(description[name]) is not kind:
                raise TypeError(f"{name} is {description[name]!r}")
        return cls(
            sites=tuple(sites),
            tokens=tensors["tokens"],
            positions=tensors["positions"],
            writer_norms=tensors["writer_norms"],
            token_texts=_texts(description["token_texts"], tensors["tokens"]),
            width=description["width"],
            kinds=kinds,
            experts=experts,
            num_experts=num_experts,
            rule=description["rule"],
            semantics=description["semantics"],
            about=description["about"],
            **{name: tensors.get(name) for name in _OPTIONAL},
        )

    def _tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in ("tokens", "positions", "writer_norms", *_OPTIONAL)}
        tensors = {name: tensor for name, tensor in own.items() if tensor is not None}
        tensors |= {f"{_EXPERTS}{writer}": chosen for writer, chosen in self.experts.items()}
        for number, site in enumerate(self.sites):
            tensors |= {f"{number}.{name}": tensor for name, tensor in site.tensors().items()}
        return tensors


def routing_table(trace: Trace, token: tuple[int, int] | None = None, num_sources: int = 9) -> str:
    """Writes the routing as text: a site a line, its sources with their weights.

    Args:
        trace: What to show.
        token: (row, position in the row) of one token; by default the mean over all real tokens.
        num_sources: Show at most so many sources a site, those with the largest weights.
    """
    title, rows = _table(trace, token, num_sources)
    lines = [title, *(f"caution: {caution}" for caution in trace.cautions)]
    for row in rows:
        cells = [f"{source} {weight:.2f}" for source, weight in zip(row.sources, row.weights, strict=True)]
        lines.append(f"{row.name:<14} {'  '.join(cells + ([row.rest] if row.rest else []))}")
    return "\n".join(lines)


def _table(trace: Trace, token: tuple[int, int] | None, num_sources: int) -> tuple[str, list[Row]]:
    real, (batch, length) = trace.real, trace.tokens.shape
    shown = f"mean of {int(real.sum())} tokens" if token is None else f"token {token[1]} of text {token[0]}"
    title = f"depth routing, {trace.rule.get('type')}, {len(trace)} sites, {batch} x {length} tokens: {shown}"

    def weights_of(weights: Tensor) -> Tensor:
        return weights[:, real].mean(1) if token is None else weights[:, token[0], token[1]]

    return title, rows_of(trace.sites, weights_of, num_sources)


def _texts(rows: Any, tokens: Tensor) -> tuple[tuple[str, ...], ...]:
    """Checks the texts of tokens; TypeError and ValueError mean that they are garbled."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise TypeError("token_texts are no rows")
    if not all(isinstance(text, str) for row in rows for text in row):
        raise TypeError("token_texts hold something else than texts")
    if rows and [len(row) for row in rows] != [tokens.shape[1]] * len(tokens):
        raise ValueError("token_texts are not those of the tokens")
    return tuple(tuple(row) for row in rows)

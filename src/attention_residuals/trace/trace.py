"""A trace: the depth routing of one forward pass, by name, on disk and back with the same bits."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from attention_residuals.durable import unwritable, write_bytes
from attention_residuals.errors import CheckpointError, ConfigError, nearest
from attention_residuals.models.weights import load_tensors, read_json

__all__ = ["SiteTrace", "Trace"]

FORMAT = 2
"""Of trace.json; raised when an older version of this package could not read it."""

_TENSORS = ("weights", "logits", "source_norms", "membership")


@dataclass(frozen=True, kw_only=True)
class SiteTrace:
    """What one site read, for every token.

    ``weights`` are those that were used, with a last axis H where groups of channels have weights apart;
    ``logits`` are None for rules without scores; ``source_norms`` are L2 norms over the width;
    ``membership`` tells how many times each source's value holds each writer's output.
    """

    site: str
    part: str
    source_names: tuple[str, ...]
    weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    logits: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"] | None
    source_norms: Float[Tensor, "S B T"]
    writers: tuple[str, ...]
    membership: Float[Tensor, "S W"] | Float[Tensor, "S W B T"]

    @property
    def name(self) -> str:
        """The site, and the part where it reads separately: ``"L3.attention"`` or ``"L3.attention.v"``."""
        return self.site if self.part == "in" else f"{self.site}.{self.part}"

    @property
    def token_weights(self) -> Float[Tensor, "S B T"]:
        """The weights, averaged over groups of channels where those have weights apart."""
        return self.weights if self.weights.ndim == 3 else self.weights.mean(-1)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The depth routing of one forward pass.

    Args:
        sites: In the order in which they read.
        tokens: The ids that ran.
        positions: Their absolute positions.
        mask: True for real tokens; None when all are.
        token_texts: Each token as text, row by row; empty when no tokenizer was given.
        width: D of the model.
        rule: The residual rule's config, as JSON holds it.
        semantics: What the rule's sources and weights are (``layers.residual.Semantics``), as JSON holds it.
        about: Versions, dtype, checkpoint and whatever else says where the trace comes from.
    """

    sites: tuple[SiteTrace, ...]
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"] | None
    token_texts: tuple[tuple[str, ...], ...] = ()
    width: int
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

    def __repr__(self) -> str:
        """Shows the average routing as a table, a site a line."""
        return routing_table(self)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What to bear in mind when reading the weights of this rule, a sentence each."""
        semantics = self.semantics
        several = any(len(site.source_names) > 1 for site in self.sites)
        facts = {
            "sources are cumulative, a writer is in several of them: read the writer weights (mixing_matrix)": (
                semantics["sources"] == "cumulative" and several
            ),
            "a learned bias favours the newest source": semantics["biased"],
            "the output has no weights of its own": not semantics["output_read"] and several,
            "values are normalised, a weight is not a share of its source": semantics["values"]
            == "normalised",
        }
        return tuple(sentence for sentence, holds in facts.items() if holds)

    def save(self, folder: Path | str) -> None:
        """Writes trace.json and trace.safetensors into a folder that holds no trace yet.

        Raises:
            CheckpointError: There is a trace already, or the folder cannot be written.
        """
        folder = Path(folder)
        if (folder / "trace.json").exists():
            raise CheckpointError(
                got=f"{folder} holds a trace", expected="a folder without one", do="name another folder"
            )
        tensors = {"tokens": self.tokens, "positions": self.positions}
        if self.mask is not None:
            tensors["mask"] = self.mask
        for number, site in enumerate(self.sites):
            for name in _TENSORS:
                if (tensor := getattr(site, name)) is not None:
                    tensors[f"{number}.{name}"] = tensor
        description: dict[str, Any] = {
            "format": FORMAT,
            "sites": [
                {"site": s.site, "part": s.part, "sources": s.source_names, "writers": s.writers}
                for s in self.sites
            ],
            "token_texts": self.token_texts,
            "width": self.width,
            "rule": self.rule,
            "semantics": self.semantics,
            "about": self.about,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
            write_bytes(folder / "trace.safetensors", content)
            description["sha256"] = hashlib.sha256(content).hexdigest()
            # Last, since it is what makes the folder a trace.
            write_bytes(folder / "trace.json", (json.dumps(description, indent=1) + "\n").encode())
        except (OSError, SafetensorError) as error:
            raise unwritable(folder, error) from error

    @classmethod
    def load(cls, folder: Path | str) -> "Trace":
        """Reads a trace back.

        Raises:
            CheckpointError: Missing, damaged, or written by a newer version.
        """
        folder = Path(folder)
        description = read_json(folder / "trace.json", newest=FORMAT)
        if description["format"] < FORMAT:
            raise CheckpointError(
                got=f"{folder / 'trace.json'} of format {description['format']}",
                expected=f"format {FORMAT}, which says who wrote each source",
                do="record the trace again",
            )
        tensors = load_tensors(folder / "trace.safetensors", sha256_expected=str(description.get("sha256")))
        try:
            sites = tuple(_site(about, tensors, number) for number, about in enumerate(description["sites"]))
            texts = _texts(description["token_texts"], tensors["tokens"])
            for name, kind in (("width", int), ("rule", dict), ("semantics", dict), ("about", dict)):
                if type(description[name]) is not kind:
                    raise TypeError(f"{name} is {description[name]!r}")
            return cls(
                sites=sites,
                tokens=tensors["tokens"],
                positions=tensors["positions"],
                mask=tensors.get("mask"),
                token_texts=texts,
                width=description["width"],
                rule=description["rule"],
                semantics=description["semantics"],
                about=description["about"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                got=f"{folder / 'trace.json'}: {error!r}",
                expected="the trace.json that was saved with trace.safetensors",
                do="the file is damaged: copy it again, or record the trace again",
            ) from error


def _texts(rows: Any, tokens: Tensor) -> tuple[tuple[str, ...], ...]:
    """Checks the texts of tokens; TypeError and ValueError mean that they are garbled."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise TypeError("token_texts are no rows")
    if not all(isinstance(text, str) for row in rows for text in row):
        raise TypeError("token_texts hold something else than texts")
    if rows and [len(row) for row in rows] != [tokens.shape[1]] * len(tokens):
        raise ValueError("token_texts are not those of the tokens")
    return tuple(tuple(row) for row in rows)


def _site(about: dict[str, Any], tensors: dict[str, Tensor], number: int) -> SiteTrace:
    """Puts a site together; KeyError, TypeError and ValueError mean that its description is garbled."""
    names, writers = about["sources"], about["writers"]
    weights, membership = tensors[f"{number}.weights"], tensors[f"{number}.membership"]
    if not isinstance(names, list) or not isinstance(writers, list):
        raise TypeError(f"site {number} is {about!r}")
    if not all(isinstance(name, str) for name in (about["site"], about["part"], *names, *writers)):
        raise TypeError(f"site {number} is {about!r}")
    if (len(names), len(writers)) != membership.shape[:2] or len(names) != len(weights):
        raise ValueError(
            f"site {number} has {len(names)} names and {len(writers)} writers for {len(weights)} sources"
        )
    return SiteTrace(
        site=about["site"],
        part=about["part"],
        source_names=tuple(names),
        weights=weights,
        logits=tensors.get(f"{number}.logits"),
        source_norms=tensors[f"{number}.source_norms"],
        writers=tuple(writers),
        membership=membership,
    )


def routing_table(trace: Trace, token: tuple[int, int] | None = None, num_sources: int = 9) -> str:
    """Writes the routing as text: a site a line, its sources with their weights.

    Args:
        trace: What to show.
        token: (row, position in the row) of one token; by default the mean over all real tokens.
        num_sources: Show at most so many sources a site, those with the largest weights.
    """
    real = torch.ones_like(trace.tokens, dtype=torch.bool) if trace.mask is None else trace.mask
    batch, length = trace.tokens.shape
    shown = f"mean of {int(real.sum())} tokens" if token is None else f"token {token[1]} of text {token[0]}"
    lines = [
        f"depth routing, {trace.rule.get('type')}, {len(trace.sites)} sites, {batch} x {length} tokens: {shown}"
    ]
    lines += [f"caution: {caution}" for caution in trace.cautions]
    for site in trace.sites:
        by_token = site.token_weights
        weights = by_token[:, real].mean(1) if token is None else by_token[:, token[0], token[1]]
        kept = sorted(torch.topk(weights, min(num_sources, len(weights))).indices.tolist())
        cells = "  ".join(f"{site.source_names[source]} {weights[source]:.2f}" for source in kept)
        left = len(weights) - len(kept)
        rest = f"  ({left} more)" if left else ""
        lines.append(f"{site.name:<14} {cells}{rest}")
    return "\n".join(lines)

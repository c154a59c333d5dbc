"""A trace: the depth routing of one forward pass, by name, on disk and back with the same bits."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention_residuals.errors import CheckpointError, ConfigError, nearest
from attention_residuals.models.weights import read_json

__all__ = ["SiteTrace", "Trace"]

FORMAT = 1
"""Of trace.json; raised when an older version of this package could not read it."""

_TENSORS = ("weights", "logits", "source_norms")


@dataclass(frozen=True, kw_only=True)
class SiteTrace:
    """What one site read, for every token.

    ``weights`` are those that were used; ``logits`` are None for rules without scores; ``source_norms``
    are L2 norms over the width.
    """

    site: str
    part: str
    source_names: tuple[str, ...]
    weights: Float[Tensor, "S B T"]
    logits: Float[Tensor, "S B T"] | None
    source_norms: Float[Tensor, "S B T"]


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
        about: Versions, dtype, checkpoint and whatever else says where the trace comes from.
    """

    sites: tuple[SiteTrace, ...]
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"] | None
    token_texts: tuple[tuple[str, ...], ...] = ()
    width: int
    rule: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, site: str) -> SiteTrace:
        """Returns a site by name, such as ``"L3.attention"`` or ``"output"``.

        Raises:
            ConfigError: There is no such site.
        """
        for candidate in self.sites:
            if candidate.site == site:
                return candidate
        names = [candidate.site for candidate in self.sites]
        raise ConfigError(got=f"site {site!r}", expected="a site of this trace", do=nearest(site, names))

    def __repr__(self) -> str:
        """Shows the average routing as a table, a site a line."""
        return routing_table(self)

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
        description = {
            "format": FORMAT,
            "sites": [{"site": s.site, "part": s.part, "sources": s.source_names} for s in self.sites],
            "token_texts": self.token_texts,
            "width": self.width,
            "rule": self.rule,
            "about": self.about,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "trace.safetensors"
            )
            (folder / "trace.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                got=f"{error} while writing {folder}",
                expected="a writable disk with room",
                do="free some space",
            ) from error

    @classmethod
    def load(cls, folder: Path | str) -> "Trace":
        """Reads a trace back.

        Raises:
            CheckpointError: Missing, damaged, or written by a newer version.
        """
        folder = Path(folder)
        description = read_json(folder / "trace.json", newest=FORMAT)
        try:
            tensors = load_file(folder / "trace.safetensors")
            sites = tuple(
                SiteTrace(
                    site=about["site"],
                    part=about["part"],
                    source_names=tuple(about["sources"]),
                    weights=tensors[f"{number}.weights"],
                    logits=tensors.get(f"{number}.logits"),
                    source_norms=tensors[f"{number}.source_norms"],
                )
                for number, about in enumerate(description["sites"])
            )
            return cls(
                sites=sites,
                tokens=tensors["tokens"],
                positions=tensors["positions"],
                mask=tensors.get("mask"),
                token_texts=tuple(tuple(row) for row in description["token_texts"]),
                width=description["width"],
                rule=description["rule"],
                about=description["about"],
            )
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(
                got=f"{folder}: {error!r}",
                expected="the trace.json and trace.safetensors that were saved together",
                do="the files are damaged or mixed up: record the trace again",
            ) from error


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
    for site in trace.sites:
        weights = site.weights[:, real].mean(1) if token is None else site.weights[:, token[0], token[1]]
        kept = sorted(torch.topk(weights, min(num_sources, len(weights))).indices.tolist())
        cells = "  ".join(f"{site.source_names[source]} {weights[source]:.2f}" for source in kept)
        left = len(weights) - len(kept)
        rest = f"  ({left} more)" if left else ""
        part = "" if site.part == "in" else f" {site.part}"
        lines.append(f"{site.site + part:<14} {cells}{rest}")
    return "\n".join(lines)

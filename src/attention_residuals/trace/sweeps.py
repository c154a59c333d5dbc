"""Sweeps: the effect of many edits, one at a time, on the same texts; resumable."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from torch import Tensor

from attention_residuals.configs import encode
from attention_residuals.durable import unwritable, write_bytes
from attention_residuals.errors import CheckpointError, NoChangeError, ShapeError
from attention_residuals.layers.residual import rehearse
from attention_residuals.layers.tap import Onlooker, Read
from attention_residuals.models import LanguageModel
from attention_residuals.models.weights import fingerprint
from attention_residuals.trace.edits import Edit
from attention_residuals.trace.effects import change_of_loss, divergence
from attention_residuals.trace.intervention import intervene
from attention_residuals.trace.site import source_identity
from attention_residuals.trace.weight_edits import Drop

__all__ = ["Swept", "every_edge", "every_pair", "every_source", "reads_of", "sweep"]

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What one edit, or several at once, did to the predictions.

    Args:
        edits: What was done, as JSON.
        divergence: Mean KL(clean || edited) over real tokens, nats, 0 or more.
        loss: Mean change of the next token's cross-entropy, nats per token; above 0 the edit hurts.
    """

    edits: tuple[dict[str, Any], ...]
    divergence: float
    loss: float


class SourcesOf(NamedTuple):
    """What one read of a model has to read."""

    site: str
    part: str
    sources: tuple[str, ...]


def reads_of(model: LanguageModel) -> tuple[SourcesOf, ...]:
    """Lists a model's reads with the names of their sources, by running its residual rule on one token.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> reads_of(Decoder(presets.scaled(2, vocab_size=300)))[1]
        SourcesOf(site='L0.mlp', part='in', sources=('embedding', 'L0.attention'))
    """
    looker, parameter = _Looker(), next(model.parameters())
    rehearse(model.residual, parameter.new_ones(1, 1, model.residual.width), looker)
    return tuple(looker.reads)


def every_edge(model: LanguageModel) -> list[list[Edit]]:
    """Drops each source at each read, one at a time; reads of a single source are left alone."""
    return [
        [Drop(sites=read.site, part=read.part, sources=source)]  # type: ignore[arg-type] # one of four
        for read in reads_of(model)
        for source in read.sources
        if len(read.sources) > 1
    ]


def every_source(model: LanguageModel) -> list[list[Edit]]:
    """Drops each source at all reads that have another one, one source at a time."""
    readers: dict[str, list[SourcesOf]] = {}
    for read in reads_of(model):
        for source in read.sources:
            if len(read.sources) > 1:
                readers.setdefault(source_identity(source), []).append(read)
    return [
        [Drop(sites=tuple(dict.fromkeys(read.site for read in reads)), sources=source)]
        for source, reads in readers.items()
    ]


def every_pair(model: LanguageModel, site: str) -> list[list[Edit]]:
    """Drops each two sources of one site together; a site of two sources has no pair to spare.

    Edges that stand in for one another show here: each alone does little, both together much.
    """
    return [
        [Drop(sites=site, part=read.part, sources=pair)]  # type: ignore[arg-type] # one of four
        for read in reads_of(model)
        if read.site == site and len(read.sources) > 2
        for pair in combinations(read.sources, 2)
    ]


def sweep(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    edits: Sequence[Sequence[Edit]],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    batch_size: int = 16,
    folder: Path | str | None = None,
    progress: bool = True,
) -> list[Swept]:
    """Measures the effect of each edit on the same texts.

    Args:
        model: Any language model.
        tokens: Texts.
        edits: Each entry is made alone: one edit, or several at once.
        mask: True for real tokens; effects are averages over the real ones.
        batch_size: Texts at once.
        folder: Keeps what is done as it is done; the same call goes on where it was stopped.
        progress: Show progress and the time left on stderr.

    Returns:
        One entry for each of ``edits``, in their order. An edit that changes nothing (a source whose weight
        is 0) has the effects 0. The clean pass is a plain one, so that effects below about 1e-7 nats are
        rounding.

    Raises:
        CheckpointError: The folder holds another sweep, or cannot be written.
        ConfigError: A site or source that the model does not have.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model, tokens = Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]])
        >>> found = sweep(model, tokens, every_edge(model), progress=False)
        >>> len(found), found[0].edits[0]["sites"], found[0].divergence > 0
        (14, 'L0.mlp', True)
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ShapeError(
            got=f"tokens of shape {list(tokens.shape)}",
            expected="[B, T] with at least two tokens, so that there is a next one",
            do="pass longer texts",
        )
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    batches = list(zip(tokens.split(batch_size), real.split(batch_size), strict=True))
    with torch.no_grad():
        clean = [model(part, mask=None if mask is None else part_real) for part, part_real in batches]
    with _Done(folder, model, tokens, real, edits) as done:
        for number in _shown(range(len(done.rows), len(edits)), len(edits), progress):
            done.add(_swept(model, batches, clean, edits[number], masked=mask is not None))
        return done.rows


def _swept(
    model: LanguageModel,
    batches: Sequence[tuple[Tensor, Tensor]],
    clean: Sequence[Tensor],
    edits: Sequence[Edit],
    *,
    masked: bool,
) -> Swept:
    total_kl, total_loss, num_tokens, num_targets = 0.0, 0.0, 0, 0
    for (tokens, real), logits in zip(batches, clean, strict=True):
        try:
            edited = intervene(model, tokens, edits, mask=real if masked else None).logits
        except NoChangeError:
            edited = logits
        targets = real[:, 1:] & real[:, :-1]
        total_kl += divergence(logits, edited).values[real].sum().item()
        total_loss += change_of_loss(logits, edited, tokens).values[targets].sum().item()
        num_tokens, num_targets = num_tokens + int(real.sum()), num_targets + int(targets.sum())
    described = tuple(encode(edit) for edit in edits)
    return Swept(edits=described, divergence=total_kl / num_tokens, loss=total_loss / max(1, num_targets))


class _Done:
    """What is done of a sweep, in memory and in a folder."""

    def __init__(
        self,
        folder: Path | str | None,
        model: LanguageModel,
        tokens: Tensor,
        real: Tensor,
        edits: Sequence[Sequence[Edit]],
    ) -> None:
        self.rows: list[Swept] = []
        self._file = None
        if folder is None:
            return
        folder = Path(folder)
        ours = {"format": FORMAT, "sweep": _identity(model, tokens, real, edits)}
        path, log = folder / "sweep.json", folder / "effects.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_bytes(path, (json.dumps(ours) + "\n").encode())
            elif json.loads(path.read_text(encoding="utf-8")) != ours:
                raise CheckpointError(
                    got=f"{folder}, which holds another sweep",
                    expected="a new folder, or the same model, texts and edits",
                    do="name another folder",
                )
            self._read(log)
            self._file = log.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise unwritable(folder, OSError(str(error))) from error

    def _read(self, log: Path) -> None:
        """Takes the whole lines; a last line that a killed process left half-written is cut off."""
        if not log.exists():
            return
        content = log.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            log.write_bytes(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self.rows.append(Swept(**{**row, "edits": tuple(row["edits"])}))

    def add(self, row: Swept) -> None:
        """Keeps one more result, so that a kill loses none that is done."""
        self.rows.append(row)
        if self._file is not None:
            self._file.write(
                json.dumps({"edits": row.edits, "divergence": row.divergence, "loss": row.loss}) + "\n"
            )
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> "_Done":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def _identity(
    model: LanguageModel, tokens: Tensor, real: Tensor, edits: Sequence[Sequence[Edit]]
) -> dict[str, str]:
    """Returns what makes a sweep this sweep."""
    texts = hashlib.sha256(json.dumps([tokens.tolist(), real.tolist()]).encode())
    described = json.dumps([[encode(edit) for edit in several] for several in edits])
    return {
        "model": fingerprint(model),
        "texts": texts.hexdigest(),
        "edits": hashlib.sha256(described.encode()).hexdigest(),
    }


def _shown(numbers: range, total: int, progress: bool) -> Iterator[int]:
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("sweep", total=total, completed=total - len(numbers))
        for number in numbers:
            yield number
            bar.advance(task)


class _Looker(Onlooker):
    """A tap that notes what reads have to read."""

    def __init__(self) -> None:
        self.reads: list[SourcesOf] = []

    def read(self, read: Read) -> Read:
        """Notes the names."""
        self.reads.append(SourcesOf(str(read.site), read.part, read.source_names))
        return read

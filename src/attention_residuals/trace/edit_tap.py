"""The tap that makes edits in a forward pass, and the account of what each one did."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from attention_residuals.errors import EditError, NoChangeError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Pass, Read, Write
from attention_residuals.ops import weighted_sum
from attention_residuals.ops.depth_read import compute_dtype
from attention_residuals.trace.edits import Edit, ReadEdit, WriteEdit, by_token
from attention_residuals.trace.place import Place, Scene
from attention_residuals.trace.references import Means, Reference, read_name, token_numbers
from attention_residuals.trace.selection import chosen, counts_back, in_numbers, require_known
from attention_residuals.trace.value_edits import RemoveWriter, ValueEdit, Zero

__all__ = ["EditTap", "Receipt", "Tally"]


class Receipt(NamedTuple):
    """What one edit did.

    ``fired`` counts the reads or writes that it changed, ``tokens`` the tokens in them, and ``places`` names
    them. The largest change of any weight is absolute, 0 to 1 for a softmax; that of a state (of a write, for
    edits of writes) is the length of the difference by the length before, for one token; 0: none. Changes
    are those that the edit itself made, on top of the edits before it.
    """

    edit: Edit
    fired: int
    tokens: int
    places: tuple[str, ...]
    largest_weight_change: float
    largest_state_change: float


@dataclass
class Tally:
    """An edit, the places in the model that it is for, and what it has done so far."""

    edit: Edit
    targets: frozenset[str]
    fired: int = 0
    tokens: int = 0
    places: dict[str, None] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)
    weight_change: float = 0.0
    state_change: float = 0.0
    rounding: float = 0.0

    def count(self, place: str, tokens: Tensor, weight_change: float, before: Tensor, after: Tensor) -> None:
        """Notes that the edit has acted.

        Raises:
            EditError: What it left is not finite.
        """
        self.rounding = 32 * torch.finfo(compute_dtype(before.dtype)).eps
        before, after = before.detach()[tokens].double(), after.detach()[tokens].double()
        length = before.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        state_change = ((after - before).norm(dim=-1) / length).max().item()
        if not math.isfinite(state_change) or not math.isfinite(weight_change):
            raise EditError(
                got=f"{self.edit} at {place}, which leaves NaN or infinity",
                expected="numbers",
                do="look at the edits before it: forced weights may have no scores, a reference may hold NaN",
            )
        self.fired += 1
        self.tokens += int(tokens.sum())
        self.places[place] = None
        self.weight_change = max(self.weight_change, weight_change)
        self.state_change = max(self.state_change, state_change)

    def receipt(self) -> Receipt:
        """Tells what the edit has done; an edit that has done nothing is an error."""
        if isinstance(self.edit, ReadEdit) and self.sources:
            require_known("source", self.edit.source_patterns, self.sources)
        if not self.fired:
            raise EditError(
                got=f"{self.edit}, which never fired",
                expected="an edit that finds its tokens, at a read or write that happens",
                do="look at its positions and rows: padding is not counted",
            )
        if max(self.weight_change, self.state_change) <= self.rounding:
            raise NoChangeError(
                got=f"{self.edit}, which fired {self.fired} times and changed nothing",
                expected=f"a change larger than what rounding does, {self.rounding:.0e}",
                do="leave it out, or take the reference from another text",
            )
        return Receipt(
            self.edit, self.fired, self.tokens, tuple(self.places), self.weight_change, self.state_change
        )


class EditTap:
    """Makes the edits in one forward pass.

    Args:
        rule: The model's.
        tallies: The edits, which act in this order, with what they have done so far.
        references: What edits take from other runs.
        acts: False for a control: reads are mixed as they are when they are edited, and nothing is.
    """

    def __init__(
        self,
        rule: ResidualRule[Any],
        tallies: list[Tally],
        references: Mapping[str, Reference | Means],
        *,
        acts: bool,
    ) -> None:
        self.rule, self.tallies, self.references, self.acts = rule, tallies, references, acts
        self.wanted = {tally.edit.writer for tally in tallies if isinstance(tally.edit, RemoveWriter)}

    def begin(self, run: Pass) -> None:
        """Finds the tokens of each edit.

        Raises:
            EditError: Rows that the batch does not have, or positions from an end that is not known.
        """
        numbers, real = token_numbers(run)
        self.scene = Scene(self.rule, self.references, numbers, real, {})
        self.tokens = [self._tokens(tally.edit) for tally in self.tallies]

    def read(self, read: Read) -> Read:
        """Makes the edits of a read, in their order.

        Raises:
            EditError: One that the rule, the references or the edits before it do not allow.
        """
        # Where the logits are what the rule makes of the values: only there can it score them anew.
        scored = torch.ones_like(self.scene.real)
        for tally, tokens in zip(self.tallies, self.tokens, strict=True):
            edit = tally.edit
            if not isinstance(edit, ReadEdit) or read_name(read) not in tally.targets:
                continue
            tally.sources.update(dict.fromkeys(read.source_names))
            sources = _sources(edit, read)
            if not sources:
                continue
            at = Place(self.scene, tokens, sources, _heads(edit, read))
            before, read = read, _mixed_anew(edit, read)
            if not self.acts or not tokens.any():
                continue
            if edit.scores_anew and not scored[tokens].all():
                raise EditError(
                    got=f"{edit} at {read_name(read)}, which scores anew, behind an edit of the same read and tokens",
                    expected="scores that are the rule's own",
                    do="put edits of queries, and those with reroute=True, first",
                )
            read = edit.edited(read, at)
            scored = scored if edit.keeps_scores else scored & ~tokens
            change = (read.weights - before.weights).detach()[:, tokens].abs().max().item()
            states = (weighted_sum(one.weights.detach(), one.values) for one in (before, read))
            tally.count(read_name(read), tokens, change, *states)
        return read

    def write(self, write: Write) -> Write:
        """Makes the edits of a write, in their order.

        Raises:
            EditError: One that the references do not allow.
        """
        for tally, tokens in zip(self.tallies, self.tokens, strict=True):
            edit = tally.edit
            acts = isinstance(edit, WriteEdit) and write.writer in tally.targets
            if not acts or not self.acts or not tokens.any():
                continue
            assert isinstance(edit, WriteEdit)
            output = edit.output(write, Place(self.scene, tokens)).to(write.output.dtype)
            output = torch.where(tokens[..., None], output, write.output)
            tally.count(write.writer, tokens, 0.0, write.output, output)
            write = write._replace(output=output)
        if write.writer in self.wanted:
            self.scene.writes[write.writer] = write.output
        return write

    def _tokens(self, edit: Edit) -> Bool[Tensor, "B T"]:
        """Finds the tokens of an edit."""
        scene = self.scene
        first = scene.numbers.masked_fill(~scene.real, torch.iinfo(torch.int64).max).min()
        if counts_back(edit.positions) and first > 0:
            raise EditError(
                got=f"positions={edit.positions} in a pass that goes on with a text",
                expected="positions counted from the start, 0 or more",
                do="count from the start: where the text will end is not known while it is made",
            )
        ends = scene.numbers.masked_fill(~scene.real, -1).amax(1) + 1
        found = in_numbers(scene.numbers, edit.positions, ends) & scene.real
        if edit.rows is None:
            return found
        if max(edit.rows) >= len(found):
            raise EditError(
                got=f"rows={edit.rows}", expected=f"0 to {len(found) - 1}", do="select rows of the batch"
            )
        rows = torch.zeros(len(found), 1, dtype=torch.bool, device=found.device)
        rows[list(edit.rows)] = True
        return found & rows


def _sources(edit: ReadEdit, read: Read) -> tuple[int, ...]:
    """Numbers the sources of a read that an edit is for; none where it does not act."""
    if not isinstance(edit, RemoveWriter):
        return chosen(read.source_names, edit.source_patterns)
    if edit.writer not in read.writers:
        return ()
    held = read.membership[:, read.writers.index(edit.writer)].reshape(len(read.values), -1)
    return tuple((held != 0).any(1).nonzero().flatten().tolist())


def _heads(edit: ReadEdit, read: Read) -> tuple[int, ...] | None:
    groups = 0 if read.weights.ndim == 3 else read.weights.shape[-1]
    if edit.heads is not None and (not groups or not all(0 <= head < groups for head in edit.heads)):
        raise EditError(
            got=f"heads={edit.heads} at {read_name(read)}",
            expected=f"0 to {groups - 1}" if groups else "no heads: all channels have the same weights",
            do="leave heads out for all channels",
        )
    return edit.heads


def _mixed_anew(edit: ReadEdit, read: Read) -> Read:
    """Gives a read weights that are another object, so that it is mixed from them whatever the tokens are.

    Then a token's numbers do not depend on whether others are edited, and traces of passes fit together.
    """
    holds = by_token(read) if isinstance(edit, Zero | ValueEdit | RemoveWriter) else read
    return holds._replace(weights=read.weights.clone())

"""Interventions: edits made on a forward pass, with a receipt of what each one did."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, EditError, nearest
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Chain, Tap, writer_names
from attention_residuals.models import LanguageModel
from attention_residuals.trace.edit_tap import EditTap, Receipt, Tally
from attention_residuals.trace.edits import Edit, ReadEdit, WriteEdit
from attention_residuals.trace.recorder import Recorder
from attention_residuals.trace.references import Means, Reference
from attention_residuals.trace.selection import chosen, require_known
from attention_residuals.trace.trace import Trace
from attention_residuals.trace.value_edits import RemoveWriter

__all__ = ["Intervened", "Intervention", "control", "intervene"]


class Intervened(NamedTuple):
    """The result of an intervention; ``trace`` is that of the edited pass, where its tap was a ``Recorder``."""

    logits: Float[Tensor, "B T V"]
    receipts: tuple[Receipt, ...]
    trace: Trace | None


class Intervention:
    """Edits for one model, to be made in one pass or in the passes of one generation.

    Nothing of the model is changed, so that nothing is left behind, whatever happens. ``tap`` fits where
    taps are made for each pass: ``engine.stream(prompt, max_new_tokens=9, tap=intervention.tap)``. Ask for
    the receipts at the end: they say whether the edits did anything.

    Args:
        model: Any language model.
        edits: Act in this order.
        references: What edits take from other runs, by the names that they have for them.

    Raises:
        ConfigError: No edits, or a site, part or writer that the model does not have.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> from attention_residuals.inference import Engine
        >>> from attention_residuals.trace import Drop
        >>> engine = Engine(Decoder(presets.scaled(2, vocab_size=300)))
        >>> intervention = Intervention(engine.model, [Drop(sites="output", sources="L0.mlp", positions=("2..",))])
        >>> pieces = list(engine.stream([5, 6], max_new_tokens=3, tap=intervention.tap))
        >>> [(receipt.fired, receipt.tokens) for receipt in intervention.receipts()]
        [(2, 2)]
    """

    def __init__(
        self,
        model: LanguageModel,
        edits: Sequence[Edit],
        *,
        references: Mapping[str, Reference | Means] | None = None,
    ) -> None:
        if not edits:
            raise ConfigError(got="no edits", expected="one or more", do="pass a list of edits")
        self.rule, self.references = model.residual, dict(references or {})
        self._tallies = [Tally(edit, _targets(edit, self.rule)) for edit in edits]

    def tap(self) -> Tap:
        """Makes the tap for one forward pass."""
        return EditTap(self.rule, self._tallies, self.references, acts=True)

    def control_tap(self) -> Tap:
        """Makes a tap that edits nothing, and lets the reads that edits are for be mixed as edited ones are."""
        return EditTap(self.rule, self._tallies, self.references, acts=False)

    def receipts(self) -> tuple[Receipt, ...]:
        """Tells what each edit has done in all passes so far.

        Raises:
            ConfigError: A source that no read had.
            EditError: An edit that never fired, or that has changed nothing beyond rounding.
        """
        return tuple(tally.receipt() for tally in self._tallies)


def intervene(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    edits: Sequence[Edit],
    *,
    references: Mapping[str, Reference | Means] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
    residual: ResidualRule[Any] | None = None,
    tap: Tap | None = None,
) -> Intervened:
    """Runs a model once, without gradients, with edits made on the way.

    Args:
        model: Any language model.
        tokens: Texts.
        edits: Act in this order, each on what those before it have left.
        references: Runs and means that edits take from, by the names that they have for them.
        mask: True for real tokens; the others are never edited.
        positions: As for the model.
        residual: Another schedule of the model's rule.
        tap: Sees the pass as it is edited; a ``Recorder`` records its trace.

    Raises:
        ConfigError: A site, source or writer that the model does not have.
        EditError: An edit that the rule cannot make, that never fired, or that changed nothing; a paired run
            of texts of other lengths.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> from attention_residuals.trace import Recorder, ZeroWrite
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> found = intervene(model, tokens, [ZeroWrite(writers="L0.mlp", positions=(1,))], tap=Recorder())
        >>> found.receipts[0].fired, found.receipts[0].largest_state_change
        (1, 1.0)
        >>> found.trace["output"].source_norms[2, 0].count_nonzero()  # of three tokens
        tensor(2)
    """
    intervention = Intervention(model, edits, references=references)
    _require_same_lengths(tokens, mask, edits, intervention.references)
    edited = intervention.tap()
    with torch.no_grad():
        logits = model(
            tokens,
            mask=mask,
            positions=positions,
            residual=residual,
            tap=edited if tap is None else Chain(edited, tap),
        )
    trace = tap.trace(model) if isinstance(tap, Recorder) else None
    return Intervened(logits, intervention.receipts(), trace)


def control(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    edits: Sequence[Edit],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
    residual: ResidualRule[Any] | None = None,
) -> Float[Tensor, "B T V"]:
    """Runs a model without the edits, by the same arithmetic that it has with them.

    A read that is edited is mixed by other code than one that is not, which rounds otherwise. Against the
    control, tokens that an edit cannot reach differ by exactly 0.

    Args:
        model: As for ``intervene``, and so on.
        tokens: The same texts.
        edits: The edits that are not made.
        mask: The same.
        positions: The same.
        residual: The same.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> from attention_residuals.trace import Drop
        >>> model, tokens = Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]])
        >>> edits = [Drop(sites="L1.*", sources="L0.mlp", positions=(1,))]
        >>> same = control(model, tokens, edits) == intervene(model, tokens, edits).logits
        >>> same.all(-1)
        tensor([[ True, False, False]])
    """
    tap = Intervention(model, edits).control_tap()
    with torch.no_grad():
        logits: Tensor = model(tokens, mask=mask, positions=positions, residual=residual, tap=tap)
    return logits


def _targets(edit: Edit, rule: ResidualRule[Any]) -> frozenset[str]:
    """Names the reads or the writers of a model that an edit is for."""
    writers = writer_names(2 * rule.num_layers)
    if isinstance(edit, RemoveWriter) and edit.writer not in writers:
        raise ConfigError(
            got=f"writer={edit.writer!r}", expected="a writer", do=nearest(edit.writer, writers)
        )
    if isinstance(edit, WriteEdit):
        patterns = edit.writer_patterns(rule.num_layers)
        require_known("writer", patterns, writers)
        return frozenset(writers[number] for number in chosen(writers, patterns))
    assert isinstance(edit, ReadEdit)
    sites = [str(site) for site in rule.sites()]
    require_known("site", edit.sites, sites)
    reads = [(rule.sites()[number], part) for number in chosen(sites, edit.sites)
             for part in rule.parts(rule.sites()[number])]  # fmt: skip
    found = frozenset(
        str(site) if part == "in" else f"{site}.{part}" for site, part in reads if edit.part in (None, part)
    )
    if not found:
        parts = sorted({part for _, part in reads})
        raise ConfigError(
            got=f"part={edit.part!r} at {edit.sites!r}",
            expected=f"one of {parts}" if parts else "a site that is left",
            do="leave part out for all reads of a site",
        )
    return found


def _require_same_lengths(
    tokens: Tensor, mask: Tensor | None, edits: Sequence[Edit], references: Mapping[str, Reference | Means]
) -> None:
    lengths = torch.full((len(tokens),), tokens.shape[1]) if mask is None else mask.sum(1).cpu()
    for edit in edits:
        run = references.get(edit.paired_with or "")
        if isinstance(run, Reference) and not torch.equal(run.real.sum(1).cpu(), lengths):
            raise EditError(
                got=f"texts of {lengths.tolist()} tokens, paired with {run.real.sum(1).tolist()}",
                expected="a paired run of the same lengths, row by row",
                do="pair texts that differ in their tokens, not in their number",
            )

"""Edits as data: what they have in common, and the change of a read's weights and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError, EditError
from attention_residuals.layers.residual import ResidualRule, SourceRule
from attention_residuals.layers.residual.sigmoid import SigmoidRule
from attention_residuals.layers.tap import Read, Write
from attention_residuals.trace.place import Place
from attention_residuals.trace.references import read_name
from attention_residuals.trace.selection import Names, Numbers, checked_names, checked_numbers

__all__ = ["Edit", "ReadEdit", "SourceEdit", "WriteEdit"]

COMPETING = ("softmax", "softmax of learned", "1 + softmax", "sigmoid")
"""The kinds of weights that a rule makes of scores, one by one or against each other."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One intervention on a forward pass, as data.

    Args:
        positions: Numbers of tokens in their texts, and ranges of them, as in ``(0, "3..7", -1)``; None: all.
            Padding is not counted and never edited. Negative numbers count back from the end of a text,
            which a text that is being generated does not have.
        rows: Rows of the batch; None: all.
    """

    positions: Numbers | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checked_numbers("positions", self.positions)
        if self.rows is not None and (not self.rows or min(self.rows) < 0):
            raise ConfigError(
                got=f"rows={self.rows}", expected="row numbers from 0", do="leave it out for all"
            )

    @property
    def paired_with(self) -> str | None:
        """The reference whose texts must be as long as those that are edited; None where none must."""
        return None


@dataclass(frozen=True, kw_only=True)
class ReadEdit(Edit, ABC):
    """A change of one reader's read; all other readers see what they saw (an edge of the graph).

    Args:
        sites: Names or patterns of sites: ``"L3.mlp"``, ``"attention"`` (all of a kind), ``"L[2-4].*"``,
            ``"output"``, ``("*", "!L0.attention")`` (all but one).
        part: ``"q"``, ``"k"`` or ``"v"`` where a site reads separately for them, ``"in"`` for the read of
            other sites; None: all reads.
        heads: Groups of channels, where those have weights apart; None: all.
    """

    sites: Names = "*"
    part: Literal["q", "k", "v", "in"] | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_names("sites", self.sites)

    @property
    def source_patterns(self) -> Names:
        """The sources without which the edit does not act in a read."""
        return "*"

    @property
    def scores_anew(self) -> bool:
        """Whether the rule scores the sources anew, which must come before other edits of the same tokens."""
        return False

    @property
    def keeps_scores(self) -> bool:
        """Whether the read's logits stay what the rule makes of its values."""
        return False

    @abstractmethod
    def edited(self, read: Read, at: Place) -> Read:
        """Returns the read with the change made at a place."""


@dataclass(frozen=True, kw_only=True)
class SourceEdit(ReadEdit, ABC):
    """A change of some sources of a read.

    Args:
        sources: Names or patterns: ``"embedding"``, ``"L3.mlp"``, ``"B2"``; ``"B3"`` is the third block also
            while it is open. A read without such a source stays as it is.
    """

    sources: Names = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_names("sources", self.sources)

    @property
    def source_patterns(self) -> Names:
        """The sources that are chosen."""
        return self.sources


@dataclass(frozen=True, kw_only=True)
class WriteEdit(Edit, ABC):
    """A change of what writers write: all their readers see it, in keys and in values (a node of the graph)."""

    @abstractmethod
    def writer_patterns(self, num_layers: int) -> Names:
        """Names the writers of a model of so many layers."""

    @abstractmethod
    def output(self, write: Write, at: Place) -> Tensor:
        """Returns what is written in place of an output; tokens that are not chosen do not matter."""


def with_weights(read: Read, at: Place, weights: Tensor, logits: Tensor | None = None) -> Read:
    """Puts weights in place at the chosen tokens and heads, with the scores that give them."""
    marked = at.in_weights(read.weights)
    changed = read._replace(weights=torch.where(marked, weights.to(read.weights.dtype), read.weights))
    if read.logits is None:
        return changed
    logits = _scores_of(at.scene.rule, changed.weights) if logits is None else logits
    return changed._replace(logits=torch.where(marked, logits.to(read.logits.dtype), read.logits))


def with_value(read: Read, at: Place, source: int, value: Tensor, held: Tensor) -> Read:
    """Puts a value in place at the chosen tokens and heads.

    ``held`` tells how many times it holds each writer's output, [W] and tokens; NaN where nobody knows.
    """
    old = read.values[source]
    new = torch.where(at.in_value(read), value.to(old.dtype), old)
    values = (*read.values[:source], new, *read.values[source + 1 :])
    sources = read.sources
    if sources[source] is old:  # else values are made of sources, and those stay what they were
        sources = (*sources[:source], new, *sources[source + 1 :])
    membership = by_token(read).membership.clone()
    held = held.to(membership.dtype)
    if at.heads is not None:  # membership is that of whole vectors
        held = torch.where(held == membership[source], held, torch.nan)
    membership[source] = torch.where(at.tokens, held, membership[source])
    return read._replace(values=values, sources=sources, membership=membership)


def by_token(read: Read) -> Read:
    """Gives a read one membership for each token, [S, W, B, T]."""
    if read.membership.ndim == 4:
        return read
    member = read.membership.to(read.weights.device)[..., None, None]
    return read._replace(membership=member.expand(-1, -1, *read.weights.shape[1:3]))


def rescored(read: Read, at: Place) -> Read:
    """Lets the rule score the values as they are now, at the chosen tokens; keys of all heads are new.

    Raises:
        EditError: A rule that does not score values.
    """
    rule = at.scene.rule
    if not isinstance(rule, SourceRule) or rule.semantics.weights not in COMPETING:
        raise unscored(read, rule, "routing anew")
    found = rule.attend(read.values, read.site, read.part, None, None)
    read = with_weights(read, at._replace(heads=None), weights_of(rule, found.logits), found.logits)
    assert read.inverse_norms is not None
    marked = at._replace(heads=None).in_weights(read.inverse_norms)
    return read._replace(inverse_norms=torch.where(marked, found.inverse_norms, read.inverse_norms))


def weights_of(rule: ResidualRule[object], logits: Tensor) -> Tensor:
    """Makes weights of scores as the rule does; a source with the score -inf has weight 0 in every rule."""
    return rule.weights_of(logits).masked_fill(logits == -torch.inf, 0.0)


def scores_in(read: Read, rule: ResidualRule[object], verb: str) -> Tensor:
    """Returns a read's scores.

    Raises:
        EditError: A rule whose weights are made of no scores.
    """
    if read.logits is None or rule.semantics.weights not in COMPETING:
        raise unscored(read, rule, verb)
    return read.logits


def unscored(read: Read, rule: ResidualRule[object], verb: str) -> EditError:
    """Makes the error of a rule that cannot do what needs scores."""
    return EditError(
        got=f"{verb} at {read_name(read)} of a {type(rule).__name__}, whose weights are {rule.semantics.weights!r}",
        expected="a rule that makes its weights of scores of the sources, such as AttnRes",
        do="use Zero, Mean, Patch or an edit of writes, which any rule can do",
    )


def _scores_of(rule: ResidualRule[object], weights: Tensor) -> Float[Tensor, "S *BT"]:
    """Finds scores of which the rule would make such weights; NaN where there are none."""
    kind = rule.semantics.weights
    if kind in ("softmax", "softmax of learned"):
        return weights.log()
    if kind == "1 + softmax":
        return (weights - 1).log()
    if kind == "sigmoid":
        assert isinstance(rule, SigmoidRule)
        return (weights / 2 if rule.config.normalised else weights).logit()
    return weights  # numbers that are learned are their own scores

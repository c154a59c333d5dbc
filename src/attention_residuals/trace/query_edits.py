"""Edits of the pseudo-query that a read scores its sources by."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import cos, radians, sin
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attention_residuals.errors import ConfigError, is_finite, nearest
from attention_residuals.layers.residual import ResidualRule, SourceRule
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.layers.tap import Read
from attention_residuals.ops import DepthRead
from attention_residuals.trace.edits import ReadEdit, unscored, weights_of, with_weights
from attention_residuals.trace.place import Place, seeded
from attention_residuals.trace.references import read_name

__all__ = ["QueryEdit", "ReplaceQuery", "RotateQuery", "ScaleQuery"]


@dataclass(frozen=True, kw_only=True)
class QueryEdit(ReadEdit, ABC):
    """The read's pseudo-query is another one; the rule scores the sources anew with it."""

    @property
    def scores_anew(self) -> bool:
        """It does."""
        return True

    @abstractmethod
    def query(self, own: Tensor, read: Read, rule: ResidualRule[object]) -> Tensor:
        """Makes the other query of the read's own."""

    def edited(self, read: Read, at: Place) -> Read:
        """Scores the sources by the other query.

        Raises:
            EditError: The read has no pseudo-query.
        """
        rule = at.scene.rule
        own = _queries(rule).get(read_name(read))
        if own is None or not isinstance(rule, SourceRule):
            raise unscored(read, rule, type(self).__name__)
        name = f"rule.readers.{reader_name(read.site, read.part)}.pseudo_query"
        # The parameter itself is put back at once, whatever happens.
        scores: DepthRead = functional_call(_Attend(rule), {name: self.query(own, read, rule)}, (read,))
        return with_weights(read, at, weights_of(rule, scores.logits), scores.logits)


@dataclass(frozen=True, kw_only=True)
class ScaleQuery(QueryEdit):
    """The pseudo-query is longer or shorter.

    Args:
        factor: 0: scores without a query; 1: as it is; below 0: turned around.
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_finite("factor", self.factor)

    def query(self, own: Tensor, read: Read, rule: ResidualRule[object]) -> Tensor:
        """Scales it."""
        return own * self.factor


@dataclass(frozen=True, kw_only=True)
class RotateQuery(QueryEdit):
    """The pseudo-query is turned in a plane with a random direction; its length stays.

    Args:
        degrees: How far; 0 changes nothing, 180 turns it around.
        seed: Decides the direction, together with the name of the read.
    """

    degrees: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_finite("degrees", self.degrees)

    def query(self, own: Tensor, read: Read, rule: ResidualRule[object]) -> Tensor:
        """Turns it."""
        direction = torch.randn(len(own), generator=seeded(self.seed, read_name(read)), dtype=torch.float64)
        direction, length = direction.to(own), own.norm()
        if length == 0:
            return own
        across = direction - own * (direction @ own) / length.square()
        angle = radians(self.degrees)
        turned: Tensor = cos(angle) * own + sin(angle) * length * across / across.norm()
        return turned


@dataclass(frozen=True, kw_only=True)
class ReplaceQuery(QueryEdit):
    """The pseudo-query is another read's, or one that you give.

    Args:
        by: The name of the other read, such as ``"L3.mlp"`` or ``"L3.attention.v"``; or D numbers.
    """

    by: str | tuple[float, ...]

    def query(self, own: Tensor, read: Read, rule: ResidualRule[object]) -> Tensor:
        """Takes it.

        Raises:
            ConfigError: No such read, or another number of numbers than D.
        """
        if isinstance(self.by, str):
            known = _queries(rule)
            if self.by not in known:
                raise ConfigError(
                    got=f"by={self.by!r}", expected="a read with a query", do=nearest(self.by, known)
                )
            return known[self.by]
        if len(self.by) != len(own) or not all(is_finite(number) for number in self.by):
            raise ConfigError(
                got=f"by={len(self.by)} numbers", expected=f"{len(own)} finite ones", do="give one a channel"
            )
        return own.new_tensor(self.by)


class _Attend(nn.Module):
    """Lets a rule score values with parameters that are not its own."""

    def __init__(self, rule: SourceRule) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, read: Read) -> DepthRead:
        scores: DepthRead = self.rule.attend(read.values, read.site, read.part, None, None)
        return scores


def _queries(rule: ResidualRule[Any]) -> dict[str, Tensor]:
    """The pseudo-queries of a rule by the name of their read; empty where it has none."""
    parameters = dict(rule.named_parameters())
    names = {
        str(site) if part == "in" else f"{site}.{part}": f"readers.{reader_name(site, part)}.pseudo_query"
        for site in rule.sites()
        for part in rule.parts(site)
    }
    return {read: parameters[name] for read, name in names.items() if name in parameters}


def _require_finite(field: str, number: float) -> None:
    if not is_finite(number):
        raise ConfigError(got=f"{field}={number}", expected="a finite number", do="pass another one")

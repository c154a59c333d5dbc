"""What one site read for every token: the numbers that a trace is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["SiteTrace", "same", "source_identity"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteTrace:
    """What one site read, for every token.

    Two of them are equal when all their names, numbers and dtypes are; NaN equals NaN.

    Args:
        site: Such as ``"L3.attention"``.
        part: ``"in"``, or ``"q"``, ``"k"``, ``"v"`` where a site reads several times.
        source_names: By identity.
        same_as: For each source the number of the first one that holds the same numbers at every token; its
            own number, unless sources are duplicates. How weight is split between duplicates means nothing.
        weights: Those that were used, with a last axis H where groups of channels have weights apart.
        logits: The scores as the rule made them; None where it scores nothing.
        inverse_norms: What the scores were multiplied by, one over the root mean square of each key.
        source_norms: L2 norms of the sources over the width.
        contribution_norms: L2 norms of what each source adds to the state, weight times value.
        projections: The part of each contribution along the state, over the state's length: (c . h) / |h|^2.
            They sum to 1, and may be below 0 or above 1. NaN where the state is zero.
        state_norms: L2 norms of the state, the sum of the contributions.
        writers: Who has written before this read, in order.
        membership: How many times each source's value holds each writer's output.
        values: What was mixed; None unless it was asked for.
    """

    site: str
    part: str
    source_names: tuple[str, ...]
    same_as: tuple[int, ...]
    weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    logits: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"] | None
    inverse_norms: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"] | None
    source_norms: Float[Tensor, "S B T"]
    contribution_norms: Float[Tensor, "S B T"]
    projections: Float[Tensor, "S B T"]
    state_norms: Float[Tensor, "B T"]
    writers: tuple[str, ...]
    membership: Float[Tensor, "S W"] | Float[Tensor, "S W B T"]
    values: Float[Tensor, "S B T D"] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SiteTrace):
            return NotImplemented
        return all(same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @property
    def name(self) -> str:
        """The site, and the part where it reads separately: ``"L3.attention"`` or ``"L3.attention.v"``."""
        return self.site if self.part == "in" else f"{self.site}.{self.part}"

    @property
    def has_duplicates(self) -> bool:
        """Tells whether two sources hold the same numbers."""
        return len(set(self.same_as)) < len(self.same_as)

    @property
    def token_weights(self) -> Float[Tensor, "S B T"]:
        """The weights, averaged over groups of channels where those have weights apart."""
        return self.weights if self.weights.ndim == 3 else self.weights.mean(-1)

    @property
    def weight_shares(self) -> Float[Tensor, "S B T"]:
        """Weights without their signs, divided by their sum; the weights themselves under a softmax.

        NaN where all weights are zero.
        """
        weights = self.token_weights.abs()
        return weights / weights.sum(0)

    @property
    def norm_shares(self) -> Float[Tensor, "S B T"]:
        """Lengths of the contributions, divided by their sum; NaN where all are zero."""
        return self.contribution_norms / self.contribution_norms.sum(0)

    def distinct(self) -> "SiteTrace":
        """Returns the read with duplicate sources made one, under the name of the first.

        Weights and projections of duplicates are added. Logits, which then have no meaning for the rule, are
        left out.
        """
        if not self.has_duplicates:
            return self
        firsts = sorted(set(self.same_as))
        groups = [[n for n, first in enumerate(self.same_as) if first == own] for own in firsts]
        weights = torch.stack([self.weights[group].sum(0) for group in groups])
        return SiteTrace(
            site=self.site,
            part=self.part,
            source_names=tuple(self.source_names[first] for first in firsts),
            same_as=tuple(range(len(firsts))),
            weights=weights,
            logits=None,
            inverse_norms=None if self.inverse_norms is None else self.inverse_norms[firsts],
            source_norms=self.source_norms[firsts],
            contribution_norms=torch.stack([self._norm_together(group) for group in groups]),
            projections=torch.stack([self.projections[group].sum(0) for group in groups]),
            state_norms=self.state_norms,
            writers=self.writers,
            membership=self.membership[firsts],
            values=None if self.values is None else self.values[firsts],
        )

    def _norm_together(self, group: list[int]) -> Float[Tensor, "B T"]:
        """Returns the length of what duplicates add together: the sum, unless weights have two signs."""
        norms = self.contribution_norms[group]
        if len(group) == 1 or self.weights.ndim == 4:
            return norms.sum(0)
        weights = self.weights[group]
        value_norms = (norms / weights.abs()).nan_to_num(0.0).amax(0)
        return weights.sum(0).abs() * value_norms

    def description(self) -> dict[str, Any]:
        """Returns what JSON holds of it."""
        return {
            "site": self.site,
            "part": self.part,
            "sources": self.source_names,
            "same_as": self.same_as,
            "writers": self.writers,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns its tensors by name, those that are there."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @classmethod
    def restored(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "SiteTrace":
        """Puts a read together again.

        Raises:
            KeyError, TypeError, ValueError: Its description is garbled.
        """
        names, writers, same_as = about["sources"], about["writers"], about["same_as"]
        if not all(isinstance(part, list) for part in (names, writers, same_as)):
            raise TypeError(f"a read is {about!r}")
        if not all(isinstance(name, str) for name in (about["site"], about["part"], *names, *writers)):
            raise TypeError(f"a read is {about!r}")
        if not all(type(first) is int and 0 <= first <= n for n, first in enumerate(same_as)):
            raise ValueError(f"same_as is {same_as!r}")
        sizes = {len(names), len(same_as), len(tensors["weights"]), len(tensors["membership"])}
        if len(sizes) > 1 or len(writers) != tensors["membership"].shape[1]:
            raise ValueError(f"{about['site']} has {len(names)} names for {len(tensors['weights'])} sources")
        return cls(
            site=about["site"],
            part=about["part"],
            source_names=tuple(names),
            same_as=tuple(same_as),
            writers=tuple(writers),
            weights=tensors["weights"],
            logits=tensors.get("logits"),
            inverse_norms=tensors.get("inverse_norms"),
            source_norms=tensors["source_norms"],
            contribution_norms=tensors["contribution_norms"],
            projections=tensors["projections"],
            state_norms=tensors["state_norms"],
            membership=tensors["membership"],
            values=tensors.get("values"),
        )


def source_identity(source_name: str) -> str:
    """Names a source whatever its state: an open block is the same block as when it is finished.

    Example:
        >>> source_identity("B2.open@L3.attention"), source_identity("embedding")
        ('B2', 'embedding')
    """
    return source_name.split(".open@")[0]


def same(one: Any, other: Any) -> bool:
    """Tells whether two parts of a trace are equal, dtypes and NaN included.

    Example:
        >>> same(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())

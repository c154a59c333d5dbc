"""Where an edit acts in one forward pass: the pass with all that edits ask for, and the places in its reads."""

import zlib
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import EditError, nearest
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Read
from attention_residuals.trace.references import Means, Reference

__all__ = ["Donor", "Place", "Scene", "moved", "seeded"]

KindT = TypeVar("KindT", Reference, Means)


class Donor(NamedTuple):
    """Where values are taken from: the tokens of another run, and for each row a row of it."""

    numbers: Int[Tensor, "R U"]
    real: Bool[Tensor, "R U"]
    rows: Int[Tensor, " B"]


class Scene(NamedTuple):
    """One forward pass, and what edits of it can ask for."""

    rule: ResidualRule[object]
    references: Mapping[str, Reference | Means]
    numbers: Int[Tensor, "B T"]
    """The number of each token in its text."""
    real: Bool[Tensor, "B T"]
    writes: dict[str, Tensor]
    """What the writers of this pass have written so far, where an edit asks for it."""

    def means(self, name: str) -> Means:
        """Returns means that were given under a name.

        Raises:
            EditError: None were.
        """
        return self._given(name, Means, "dataset_mean(model, batches)")

    def paired(self, name: str) -> tuple[Reference, Donor]:
        """Returns a run that was given under a name, to be taken from row by row.

        Raises:
            EditError: None was, or one of another number of rows.
        """
        run = self._given(name, Reference, "reference_of(model, tokens)")
        if len(run.numbers) != len(self.numbers):
            raise EditError(
                got=f"a paired run of {len(run.numbers)} rows for a batch of {len(self.numbers)}",
                expected="a pair for each row",
                do="make the reference of a batch in the same order",
            )
        rows = torch.arange(len(run.numbers), device=self.numbers.device)
        return run, Donor(run.numbers, run.real, rows)

    def resampled(self, name: str, row: int | None, seed: int) -> tuple[Reference, Donor]:
        """Returns a run that was given under a name, with the rows that values are taken from.

        A run of as many rows as the batch gives each row another one's; of other runs rows are drawn.

        Raises:
            EditError: There is no such run or row.
        """
        run = self._given(name, Reference, "reference_of(model, tokens)")
        count, available = len(self.numbers), len(run.numbers)
        if row is not None and not 0 <= row < available:
            raise EditError(got=f"row={row}", expected=f"0 to {available - 1}", do="take a row that ran")
        if row is not None:
            rows = torch.full((count,), row)
        elif count == available:
            rows = moved(count, seeded(seed))
        else:
            rows = torch.randint(available, (count,), generator=seeded(seed))
        return run, Donor(run.numbers, run.real, rows.to(self.numbers.device))

    def taken(
        self, output: Float[Tensor, "R U D"], donor: Donor, wanted: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """Takes for each token what a run holds for the token of the same number in the row of its donor.

        Args:
            output: What the run holds.
            donor: Where to take it from.
            wanted: True for the tokens that matter.

        Raises:
            EditError: The run has no token of that number.
        """
        return output[donor.rows[:, None], self.columns(donor, wanted)]

    def columns(self, donor: Donor, wanted: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Finds for each token the column of the same number in the row of its donor; see ``taken``."""
        numbers, real = donor.numbers, donor.real
        size = 1 + int(max(numbers.max(), self.numbers.max()))
        table = numbers.new_full((len(numbers), size), -1)
        row, column = real.nonzero(as_tuple=True)
        table[row, numbers[real]] = column
        found: Tensor = table[donor.rows[:, None], self.numbers.clamp_min(0)]
        missing = wanted & (found < 0)
        if missing.any():
            row, column = missing.nonzero()[0]
            raise EditError(
                got=f"token {int(self.numbers[row, column])} of row {int(row)}, which the other text does not have",
                expected="a token of that number in it",
                do="take a longer text, or select fewer positions",
            )
        return found.clamp_min(0)

    def _given(self, name: str, kind: type[KindT], how: str) -> KindT:
        found = self.references.get(name)
        if not isinstance(found, kind):
            raise EditError(
                got=f"{'no' if found is None else f'a {type(found).__name__} as'} reference {name!r}",
                expected=f"references={{{name!r}: {how}}}",
                do=nearest(name, self.references) if self.references else f"pass {how} by that name",
            )
        return found


class Place(NamedTuple):
    """Where an edit acts in one read, or in one write, which has no sources and heads."""

    scene: Scene
    tokens: Bool[Tensor, "B T"]
    sources: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    """Groups of channels; None for all of them, or where they have no weights apart."""

    def in_weights(self, weights: Tensor) -> Bool[Tensor, "1 B T"] | Bool[Tensor, "1 B T _"]:
        """Marks the tokens, and the heads, of weights [S, B, T] or [S, B, T, H]."""
        if weights.ndim == 3:
            return self.tokens[None]
        return (self.tokens[..., None] & self._marked(weights.shape[-1]))[None]

    def of_sources(self, weights: Tensor) -> Bool[Tensor, "S B T"] | Bool[Tensor, "S B T H"]:
        """Marks the same at the chosen sources only."""
        marked = torch.zeros_like(weights, dtype=torch.bool)
        marked[list(self.sources)] = True
        return marked & self.in_weights(weights)

    def in_value(self, read: Read) -> Bool[Tensor, "B T _"]:
        """Marks the tokens, and the channels of the heads, of a value."""
        if self.heads is None:
            return self.tokens[..., None]
        num_heads, width = read.weights.shape[-1], read.values[0].shape[-1]
        return self.tokens[..., None] & self._marked(num_heads).repeat_interleave(width // num_heads)

    def _marked(self, num_heads: int) -> Bool[Tensor, " H"]:
        marked = torch.full((num_heads,), self.heads is None, device=self.tokens.device)
        if self.heads is not None:
            marked[list(self.heads)] = True
        return marked


def seeded(seed: int, name: str = "") -> torch.Generator:
    """Makes random numbers that a seed and a name decide, and nothing else does.

    Example:
        >>> torch.equal(torch.rand(2, generator=seeded(1, "a")), torch.rand(2, generator=seeded(1, "b")))
        False
    """
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def moved(count: int, generator: torch.Generator) -> Int[Tensor, " N"]:
    """Draws a permutation that leaves nothing where it is, unless there is one thing only.

    Example:
        >>> moved(2, seeded(0))
        tensor([1, 0])
    """
    order = torch.randperm(count, generator=generator)
    found = torch.empty_like(order)
    found[order] = order.roll(-1)
    return found

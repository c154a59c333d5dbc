"""Numbers that depend on a seed, an index and a purpose, and on nothing else: not on order, not on versions."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Draws"]

T = TypeVar("T")


@dataclass(frozen=True)
class Draws:
    """Draws by name. The same name gives the same draw again, and no draw moves another.

    So two templates tell the same story where both ask for the same names, and neither a new version of Python
    nor one of numpy changes an item.

    Args:
        key: What to draw for, such as a seed and an index.

    Example:
        >>> draws = Draws((0, 7))
        >>> draws.below(10, "offset"), draws.below(10, "offset"), Draws((0, 8)).below(10, "offset")
        (7, 7, 3)
    """

    key: tuple[int | str, ...]

    def share(self, *name: int | str) -> float:
        """Draws a number from 0 (included) to 1 (not included)."""
        text = "/".join(map(str, (*self.key, *name)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48

    def below(self, bound: int, *name: int | str) -> int:
        """Draws a whole number from 0 to bound - 1, each as often."""
        return int(self.share(*name) * bound)

    def one_of(self, choices: Sequence[T], *name: int | str) -> T:
        """Draws one of several, each as often."""
        return choices[self.below(len(choices), *name)]

    def some_of(self, choices: Sequence[T], number: int, *name: int | str) -> tuple[T, ...]:
        """Draws several different ones, in any order; fewer are the first of more."""
        left, taken = list(choices), []
        for place in range(number):
            taken.append(left.pop(self.below(len(left), *name, place)))
        return tuple(taken)

"""Which reads, writers, sources and tokens an edit acts on: by name, by pattern and by number."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, nearest

__all__ = ["Names", "Numbers", "checked_names", "checked_numbers", "chosen", "in_numbers", "require_known"]

Names = str | tuple[str, ...]
"""Names or patterns: ``"L3.mlp"``, ``"mlp"`` (all of a kind), ``"L[2-4].*"``, ``("*", "!L0.*")``: all but."""

Numbers = tuple[int | str, ...]
"""Numbers and ranges of them: ``(0, -1)``, ``("3..7",)`` is 3 to 6, ``("-4..",)`` the last four."""

_RANGE = re.compile(r"(-?\d{1,18})?\.\.(-?\d{1,18})?")  # what a tensor of int64 holds
_KINDS = ("attention", "mlp")


def checked_names(field: str, names: Names) -> None:
    """Refuses names that can match nothing.

    Raises:
        ConfigError: No name, or an empty one.
    """
    listed = (names,) if isinstance(names, str) else names
    if not listed or not all(name.lstrip("!") for name in listed) or listed[0].startswith("!"):
        raise ConfigError(
            got=f"{field}={names!r}",
            expected="names or patterns, with '!' before those to leave out",
            do="use '*' for all, ('*', '!L0.attention') for all but one",
        )


def checked_numbers(field: str, numbers: Numbers | None) -> None:
    """Refuses numbers and ranges that cannot be read.

    Raises:
        ConfigError: None at all, or a text that is no range.
    """
    if numbers is not None and (
        not numbers or not all(isinstance(one, int) or _RANGE.fullmatch(one) for one in numbers)
    ):
        raise ConfigError(
            got=f"{field}={numbers!r}",
            expected="numbers and ranges, such as (0, -1) or ('3..7',)",
            do="leave it out for all",
        )


def chosen(names: Sequence[str], patterns: Names) -> tuple[int, ...]:
    """Returns the places of the names that the patterns choose.

    An open block has the name of the block that it will be, unless a pattern holds an ``@``.

    Example:
        >>> chosen(("embedding", "B1", "B2.open@L2.mlp"), "B2"), chosen(("embedding", "B1"), ("*", "!B*"))
        ((2,), (0,))
    """
    listed = (patterns,) if isinstance(patterns, str) else patterns
    wanted = [pattern for pattern in listed if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in listed if pattern.startswith("!")]
    return tuple(
        number
        for number, name in enumerate(names)
        if any(_matches(name, pattern) for pattern in wanted)
        and not any(_matches(name, pattern) for pattern in unwanted)
    )


def require_known(what: str, patterns: Names, known: Iterable[str]) -> None:
    """Refuses a pattern that matches none of the names there are.

    Raises:
        ConfigError: With the nearest name.
    """
    names = list(dict.fromkeys(known))
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if not any(_matches(name, pattern.lstrip("!")) for name in names):
            raise ConfigError(
                got=f"{what} {pattern!r}",
                expected=f"the name of a {what}, or a pattern of some",
                do=nearest(pattern, names),
            )


def in_numbers(
    present: Int[Tensor, "B T"], numbers: Numbers | None, ends: Int[Tensor, " B"]
) -> Bool[Tensor, "B T"]:
    """Tells which of the numbers that are present are chosen; negative ones count back from the ends.

    Example:
        >>> in_numbers(torch.tensor([[0, 1, 2, 3]]), (0, "-2.."), torch.tensor([4]))
        tensor([[ True, False,  True,  True]])
    """
    if numbers is None:
        return torch.ones_like(present, dtype=torch.bool)
    found = torch.zeros_like(present, dtype=torch.bool)
    for one in numbers:
        if isinstance(one, int):
            found |= present == _from_start(one, ends)
            continue
        start, stop = _bounds(one)
        inside = present >= (0 if start is None else _from_start(start, ends))
        found |= inside if stop is None else inside & (present < _from_start(stop, ends))
    return found


def counts_back(numbers: Numbers | None) -> bool:
    """Tells whether some numbers count from an end.

    Example:
        >>> counts_back((3, "4..")), counts_back(("..-1",))
        (False, True)
    """
    return any(
        bound is not None and bound < 0
        for one in numbers or ()
        for bound in ((one,) if isinstance(one, int) else _bounds(one))
    )


def _matches(name: str, pattern: str) -> bool:
    if "@" not in pattern:
        name = name.partition(".open@")[0]
    return (pattern in _KINDS and name.endswith(f".{pattern}")) or fnmatchcase(name, pattern)


def _bounds(text: str) -> tuple[int | None, int | None]:
    start, stop = text.split("..")
    return int(start) if start else None, int(stop) if stop else None


def _from_start(number: int, ends: Tensor) -> Tensor:
    return (ends + number if number < 0 else torch.full_like(ends, number))[:, None]

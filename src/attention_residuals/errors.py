"""The errors of this package: each says what came, what was expected and what to do."""

import difflib
import math
from collections.abc import Iterable
from functools import partial

__all__ = [
    "AttentionResidualsError",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "EditError",
    "NewerFormatError",
    "NoChangeError",
    "NonFiniteError",
    "RankError",
    "ShapeError",
    "TapError",
    "is_count",
    "is_finite",
    "nearest",
]


class AttentionResidualsError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        got: What came, with the offending value.
        expected: What would have been accepted.
        do: What the reader of the message can do about it.

    Example:
        >>> print(ConfigError(got="width=-1", expected="width >= 1", do="pass a positive width"))
        got: width=-1
        expected: width >= 1
        do: pass a positive width
    """

    def __init__(self, *, got: str, expected: str, do: str) -> None:
        super().__init__(f"got: {got}\nexpected: {expected}\ndo: {do}")
        self.got, self.expected, self.do = got, expected, do

    def __reduce__(self) -> tuple[partial["AttentionResidualsError"], tuple[()]]:
        return partial(type(self), got=self.got, expected=self.expected, do=self.do), ()


class ShapeError(AttentionResidualsError, ValueError):
    """Tensors whose shapes, counts or dtypes do not fit together."""


class ConfigError(AttentionResidualsError, ValueError):
    """An option that does not exist, is out of range or contradicts another."""


class ConversionError(AttentionResidualsError, ValueError):
    """A model that cannot be given another residual rule without changing what it computes."""


class DataError(AttentionResidualsError, ValueError):
    """Text or tokens that cannot be used."""


class CheckpointError(AttentionResidualsError, RuntimeError):
    """A saved file that is damaged, foreign, newer than this version, or cannot be written."""


class NewerFormatError(CheckpointError):
    """A saved file of a newer version of this package; the file itself is fine."""


class NonFiniteError(AttentionResidualsError, ArithmeticError):
    """NaN or infinity where a number was needed."""


class RankError(AttentionResidualsError, RuntimeError):
    """A process of a group that no longer answers, or processes that were told different things."""


class BackendError(AttentionResidualsError, RuntimeError):
    """A named backend that cannot do this call."""


class TapError(AttentionResidualsError, RuntimeError):
    """A tap that returned what cannot stand in for what it was offered."""


class EditError(TapError):
    """An edit that cannot be made on this model or text, or that was made and changed nothing."""


class NoChangeError(EditError):
    """An edit that acted, and changed nothing beyond rounding."""


def is_count(value: object) -> bool:
    """Tells whether a value is a whole number of at least 1.

    Example:
        >>> is_count(3), is_count(0), is_count(2.0), is_count(True)
        (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finite(value: object) -> bool:
    """Tells whether a value is a number that is neither infinite nor NaN.

    Example:
        >>> is_finite(0.5), is_finite(float("nan")), is_finite("1"), is_finite(True)
        (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the closest of the known names, for the end of a message.

    Example:
        >>> nearest("widht", ["width", "depth"])
        "did you mean 'width'? known: depth, width"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"

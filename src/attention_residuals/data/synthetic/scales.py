"""What values are and how a step moves them: along a cycle, along a range, or not at all."""

from dataclasses import dataclass, replace

from attention_residuals.data.synthetic.words import COLOURS, CREATURES, DAYS, MONTHS, NUMBERS, ORDINALS
from attention_residuals.errors import ConfigError

__all__ = ["SCALES", "Scale"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Words in an order, and how far one step may move among them.

    Args:
        words: The values, each one token.
        max_offset: Largest move of one step; 0 where steps carry values over unchanged.
        cyclic: After the last word comes the first.
        facts: How a move forwards and a move backwards are told; empty where values do not move.

    Example:
        >>> week = SCALES["days"]
        >>> week.words[week.shifted(week.words.index("sunday"), 2)]
        'tuesday'
    """

    words: tuple[str, ...]
    max_offset: int
    cyclic: bool = False
    facts: tuple[str, str] = ("", "")

    def with_moves_up_to(self, max_move: int) -> "Scale":
        """Makes the same scale with shorter moves; those that are no longer stay as they are."""
        return replace(self, max_offset=min(self.max_offset, max_move))

    def values(self, num_values: int) -> range:
        """Gives the places that a claimed value may take: moves from and to all of them stay on the scale.

        A text moves twice: a stated value moves to the claimed one, and a claimed or a stated one to the
        answer. So a range keeps two moves free at either end.

        Args:
            num_values: How many are wanted, >= 2; a cycle gives all of its own, a short range fewer.

        Raises:
            ConfigError: Fewer than two were wanted.

        Example:
            >>> SCALES["numbers"].values(10), SCALES["days"].values(10)
            (range(18, 28), range(0, 7))
        """
        if num_values < 2:
            raise ConfigError(
                got=f"num_values={num_values}",
                expected="num_values >= 2: a claim can only be wrong where there is another value",
                do="pass 8",
            )
        margin = 0 if self.cyclic else 2 * self.max_offset
        room = len(self.words) - 2 * margin
        return range(margin, margin + (room if self.cyclic else min(num_values, room)))

    def shifted(self, value: int, offset: int) -> int:
        """Moves a value by an offset, which may be negative."""
        return (value + offset) % len(self.words) if self.cyclic else value + offset


SCALES = {
    "numbers": Scale(
        words=NUMBERS,
        max_offset=9,
        facts=("{value} plus {k} is {moved}", "{value} - {k} is {moved}"),
    ),
    "creatures": Scale(words=CREATURES, max_offset=0),
    "colours": Scale(words=COLOURS, max_offset=0),
    "days": Scale(
        words=DAYS,
        max_offset=5,
        cyclic=True,
        facts=("{k} days after {value} is {moved}", "{k} days before {value} is {moved}"),
    ),
    "months": Scale(
        words=MONTHS,
        max_offset=5,
        cyclic=True,
        facts=("{k} months after {value} is {moved}", "{k} months before {value} is {moved}"),
    ),
    "ordinals": Scale(
        words=ORDINALS,
        max_offset=3,
        facts=("{k} places behind {value} is {moved}", "{k} places ahead of {value} is {moved}"),
    ),
}
"""Every kind of value by name."""

"""What a story is about: which things, which values, which moves; drawn apart from the words that tell it."""

import hashlib
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.scales import Scale
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.data.synthetic.words import REMARK_WEIGHTS, REMARKS
from attention_residuals.errors import ConfigError, is_count, nearest

__all__ = ["KINDS", "SPLITS", "Kind", "Problem", "Split", "check_options", "draw_problem", "split_of"]

Kind = Literal["derived", "copied", "irrelevant", "corrected"]
"""What a text claims; see ``StepItems``."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Split = Literal["train", "pilot", "confirm"]
"""Which texts a problem may occur in."""
SPLITS: tuple[Split, ...] = get_args(Split)

_TENTHS: dict[Split, range] = {"train": range(7), "pilot": range(7, 8), "confirm": range(8, 10)}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Things, values and moves of one story.

    Args:
        main: The thing whose statement the claim follows from.
        new: The thing that the claim derives.
        last: The thing that the next step derives.
        sides: Other things that are stated, in order.
        pair: The two values that the claim may state: a and b, as places on the scale.
        first_move: Offset of the claim, >= 1; 0 where values do not move.
        second_move: Offset of the next step.
        side_values: What a claim would derive from each side by the same move.
        extras: The other attribute of each statement, where the template speaks of one.
        asked_side: Which side the next step is about, where the claim does not bear on it.
        remarks: Word after each claim.
    """

    main: str
    new: str
    last: str
    sides: tuple[str, ...]
    pair: tuple[int, int]
    first_move: int
    second_move: int
    side_values: tuple[int, ...]
    extras: tuple[int, ...]
    asked_side: int
    remarks: tuple[str, str]


def split_of(family: str, main: str, new: str, last: str, *, moves: tuple[int, int]) -> Split:
    """Says in which split a problem may occur, by the things and moves that make it up.

    A tenth of all problems is for the pilot, two tenths for the confirming run, the rest for training. So no
    problem can be in two of them, whatever the seeds.

    Example:
        >>> split_of("arithmetic", "b", "c", "d", moves=(3, 4))
        'train'
    """
    text = f"{family} {main} {new} {last} {moves[0]} {moves[1]}"
    tenth = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def draw_problem(
    draws: Draws,
    family: str,
    template: Template,
    *,
    split: Split,
    num_steps: int,
    num_values: int,
    max_move: int,
) -> Problem:
    """Draws a problem of a split; templates with the same values get the same problem from the same draws.

    Half of all side values are a or b, as often, so that "the claimed value stands elsewhere in the text" does
    not tell whether a claim is right: only whose value it is does.

    Args:
        draws: Of one item or document.
        family: A key of ``FAMILIES``.
        template: One of its templates.
        split: Where the problem may occur.
        num_steps: Statements before the claim, >= 1.
        num_values: How many values a claim may take, >= 2.
        max_move: Largest move of one step, >= 1, where the scale allows as much.
    """
    scale, things = template.values.with_moves_up_to(max_move), FAMILIES[family].things
    for attempt in count():
        names = draws.some_of(things, num_steps + 2, "things", attempt)
        moves = _move(scale, draws, "first", attempt), _move(scale, draws, "second", attempt)
        if split_of(family, names[0], names[1], names[2], moves=moves) == split:
            break
    values = scale.values(num_values)
    pair = draws.some_of(values, 2, "pair")
    num_sides = num_steps - 1
    return Problem(
        main=names[0],
        new=names[1],
        last=names[2],
        sides=names[3:],
        pair=(pair[0], pair[1]),
        first_move=moves[0],
        second_move=moves[1],
        side_values=tuple(_rival(draws, values, pair, "side", side) for side in range(num_sides)),
        extras=tuple(_rival(draws, values, pair, "extra", step) for step in range(num_steps)),
        asked_side=draws.below(max(1, num_sides), "asked"),
        remarks=(_remark(draws, 0), _remark(draws, 1)),
    )


def _move(scale: Scale, draws: Draws, *name: int | str) -> int:
    return 1 + draws.below(scale.max_offset, "move", *name) if scale.max_offset else 0


def _rival(draws: Draws, values: range, pair: tuple[int, ...], *name: int | str) -> int:
    """Draws a or b in half of all cases, any value otherwise."""
    one = draws.one_of((*pair, None, None), "rival", *name)
    return draws.one_of(values, "value", *name) if one is None else one


def _remark(draws: Draws, place: int) -> str:
    left = draws.share("remark", place)
    for word, weight in zip(REMARKS, REMARK_WEIGHTS, strict=True):
        left -= weight
        if left < 0:
            return word
    return REMARKS[-1]  # pragma: no cover  the weights sum to exactly 1


def check_options(
    *, family: str, kind: str, num_steps: int, num_values: int, max_move: int, distance: int
) -> None:
    """Checks what describes a story.

    Raises:
        ConfigError: An unknown name, or a number out of range.
    """
    if family not in FAMILIES:
        raise ConfigError(
            got=f"family={family!r}", expected="one of the families", do=nearest(family, FAMILIES)
        )
    if kind not in KINDS:
        raise ConfigError(got=f"kind={kind!r}", expected="a kind of claim", do=nearest(kind, KINDS))
    least = 2 if kind == "irrelevant" else 1
    most = len(FAMILIES[family].things) - 2
    if not least <= num_steps <= most:
        raise ConfigError(
            got=f"num_steps={num_steps} for kind {kind!r}",
            expected=f"{least} to {most} statements: each is about a thing of its own",
            do="pass num_steps=4",
        )
    nearest_step = 2 if kind == "corrected" else 1
    if not nearest_step <= distance < num_steps + nearest_step:
        raise ConfigError(
            got=f"distance={distance} with num_steps={num_steps} for kind {kind!r}",
            expected=f"{nearest_step} to {num_steps + nearest_step - 1} steps from the statement to the claim",
            do="pass a distance in that range, or more steps",
        )
    if not is_count(max_move):
        raise ConfigError(got=f"max_move={max_move!r}", expected="1 or more: a step has to move", do="pass 9")
    FAMILIES[family].templates[0].values.values(num_values)

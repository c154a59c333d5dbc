"""Training texts without a story, from which looking up and comparing are learnt before a story asks for both.

An **echo** says words, and then parts of that row again, from anywhere in it: each word of a part but the first
follows from the row. **Pairs** are things with a value each, and some of them again, with or without a verdict.
A **list** states a value of each thing, in a template's sentence or as the bare pair, and then
says values again: the same lookup, across the words of a sentence. Half of the lists say right values, and half
grade what they say: to compare is learnt where nothing else has to be. Things are asked for with replacement, so
that to leave out what was said already does not help. **Matches** are words in twos with a verdict on whether
they are the same.
"""

from collections.abc import Iterator, Sequence

from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.data.synthetic.words import VERDICTS

__all__ = [
    "BARE_SHARE",
    "ECHOED",
    "GRADED_SHARE",
    "LISTED",
    "NUM_ASKED",
    "NUM_PARTS",
    "PAIRED",
    "PART",
    "Told",
    "echo",
    "graded",
    "graded_pairs",
    "listing",
    "matches",
    "pairs",
    "recalled",
]

Told = tuple[str, bool]
"""A word, and whether it counts in the loss."""

ECHOED = (6, 12)
"""Least and most words of an echo, all different."""

NUM_PARTS, PART = 4, (2, 4)
"""How many parts of an echo are said again, and the least and most words of one."""

LISTED = (2, 6)
"""Least and most things of a list."""

PAIRED = (1, 4)
"""The same of pairs that are graded: comparing begins with one."""

PAIR = "{name} {plant}"
"""A thing and its value without a sentence."""

NUM_ASKED = 8
"""How often a list asks for the value of one of its things."""

BARE_SHARE = 0.3
"""Share of lists that say things and values without a sentence."""

GRADED_SHARE = 0.5
"""Share of lists whose values are graded when they are said again."""


def echo(draws: Draws, family: str, template: Template) -> Iterator[Told]:
    """Says things and values of a family in a row, and parts of the row again."""
    words = (*template.values.words, *FAMILIES[family].things)
    said = draws.some_of(words, _between(draws, ECHOED, "number"), "words")
    yield from ((word, False) for word in (*said, "."))
    for place in range(NUM_PARTS):
        number = _between(draws, PART, "part", place)
        begin = draws.below(len(said) - number + 1, "begin", place)
        yield from ((word, at > 0) for at, word in enumerate(said[begin : begin + number]))
        yield (".", False)


def matches(draws: Draws, family: str, template: Template, wrong_share: float) -> Iterator[Told]:
    """Says things and values in twos, and of each two whether they are the same."""
    words = (*template.values.words, *FAMILIES[family].things)
    for place in range(NUM_ASKED):
        one, other = draws.some_of(words, 2, "words", place)
        is_wrong = draws.share("wrong", place) < wrong_share
        yield from ((word, False) for word in (one, other if is_wrong else one))
        yield from ((VERDICTS[is_wrong], True), (".", False))


def pairs(draws: Draws, family: str, template: Template) -> Iterator[Told]:
    """Says things with a value each, no value twice, and some of these pairs again."""
    truths, _ = _truths(draws, family, template, LISTED)
    yield from ((word, False) for name, value in truths for word in (name, value, "."))
    yield from recalled(PAIR, _asked(draws, truths))


def graded_pairs(draws: Draws, family: str, template: Template, wrong_share: float) -> Iterator[Told]:
    """Says things with a value each, and grades pairs of them; half of the wrong values were not said before."""
    truths, _ = _truths(draws, family, template, PAIRED)
    unstated = sorted(set(template.values.words) - {value for _, value in truths})
    yield from ((word, False) for name, value in truths for word in (name, value, "."))
    yield from graded(draws, PAIR, _asked(draws, truths), wrong_share, unstated)


def listing(draws: Draws, family: str, template: Template, wrong_share: float) -> Iterator[Told]:
    """States a value of each of some things, no value twice, and asks for values, or grades them."""
    truths, extras = _truths(draws, family, template, LISTED)
    is_bare = draws.share("bare") < BARE_SHARE
    stated, again = (PAIR, PAIR) if is_bare else (template.statement, template.again)
    for (name, value), extra in zip(truths, extras, strict=True):
        sentence = stated.format(name=name, value=value, plant=value, extra=extra)
        yield from ((word, False) for word in (*sentence.split(), "."))
    if draws.share("graded") < GRADED_SHARE:
        yield from graded(draws, again, _asked(draws, truths), wrong_share)
    else:
        yield from recalled(again, _asked(draws, truths))


def recalled(sentence: str, truths: Sequence[tuple[str, str]]) -> Iterator[Told]:
    """Says values of things once more, each in a sentence of its own.

    Args:
        sentence: With {name} and {plant}, the value.
        truths: Things with their values, in the order in which they are said.
    """
    at = sentence.split().index("{plant}")
    for name, value in truths:
        words = sentence.format(name=name, plant=value).split()
        yield from ((word, number == at) for number, word in enumerate(words))
        yield (".", False)


def graded(
    draws: Draws,
    sentence: str,
    truths: Sequence[tuple[str, str]],
    wrong_share: float,
    unstated: Sequence[str] = (),
) -> Iterator[Told]:
    """Says values of things with a verdict each; after ``conflict`` stands the true one.

    Args:
        draws: Decide which values are wrong.
        sentence: With {name} and {plant}, the value.
        truths: Things with their values, in the order in which they are said.
        wrong_share: Share of values that are another thing's, where another has another one.
        unstated: Values of nothing; where there are some, half of the wrong values are of them.
    """
    for place, (name, value) in enumerate(truths):
        others: Sequence[str] = sorted({other for _, other in truths} - {value})
        if unstated and (not others or draws.share("unstated", place) < 0.5):
            others = unstated
        is_wrong = bool(others) and draws.share("wrong", place) < wrong_share
        said = draws.one_of(others, "other", place) if is_wrong else value
        yield from ((word, False) for word in sentence.format(name=name, plant=said).split())
        yield from ((word, True) for word in ((VERDICTS[1], value) if is_wrong else (VERDICTS[0],)))
        yield (".", False)


def _truths(
    draws: Draws, family: str, template: Template, bounds: tuple[int, int]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Gives things with a value each, and as many values of other attributes."""
    words, things = template.values.words, FAMILIES[family].things
    number = min(_between(draws, bounds, "number"), len(words), len(things))
    named = zip(draws.some_of(things, number, "things"), draws.some_of(words, number, "values"), strict=True)
    return tuple(named), draws.some_of(words, number, "extras")


def _asked(draws: Draws, truths: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [draws.one_of(truths, "asked", place) for place in range(NUM_ASKED)]


def _between(draws: Draws, bounds: tuple[int, int], *name: int | str) -> int:
    """Draws from the least to the most, both included."""
    least, most = bounds
    return least + draws.below(most - least + 1, *name)

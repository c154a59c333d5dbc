"""Tasks of depth: values that are found in k hops, and a feature of a token that must outlast those hops.

A text states, in any order, chains of variables that are bound to one another, and then asks for some of them.
A variable k of a chain is found in k hops: it is bound to variable k - 1, and variable 1 to a value. Each hop is a
look-up by attention, so layers are needed one after the other. **k-hop binding** asks for the value. **Early-feature
recall** asks for the value and, at the same time, for the colour of the very token at which the answer is given: a
feature that the embedding of that token holds, and that all the layers that look for the value must not lose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from attention_residuals.data.sources import Document
from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.words import COLOURS, word_tokenizer
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, is_count

__all__ = [
    "BindingDocuments",
    "BindingItem",
    "BindingItems",
    "BindingProblem",
    "Bindings",
    "binding_tokenizer",
]

VARIABLES = tuple(first + second for first in "bdfgklmn" for second in "aeiou")
_MOST_VALUES = 64
_FIRST_ANSWER = 100
"""Answers that hold a colour are numbers of their own, from here."""


class BindingProblem(NamedTuple):
    """Chains and the order in which they are told."""

    chains: tuple[tuple[str, ...], ...]
    """Variables; the first of each is bound to the value, the next to the first, and so on."""
    values: tuple[int, ...]
    """Of the chains, all different."""
    statements: tuple[tuple[int, int], ...]
    """Chain and place of the variable that each statement binds, in the order of the text."""

    def words(self) -> list[str]:
        """Tells all statements."""
        told = []
        for chain, place in self.statements:
            names = self.chains[chain]
            told += [names[place], "=", str(self.values[chain]) if place == 0 else names[place - 1], "."]
        return told


@dataclass(frozen=True, kw_only=True)
class Bindings:
    """The size of the task; base of training texts and of items.

    Args:
        num_chains: C, 2 or more.
        chain_length: Variables in each chain, the most hops, 1 or more; at most 40 variables in all.
        num_values: That a chain may have, ``num_chains`` to 64.
        num_colours: M, 1 to 24. 1 asks for the value only; more ask for the colour of the asking token as well.
        seed: >= 0.

    Raises:
        ConfigError: An option out of range.
    """

    num_chains: int = 4
    chain_length: int = 6
    num_values: int = 16
    num_colours: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "num_chains": (2, len(VARIABLES)),
            "chain_length": (1, len(VARIABLES) // max(1, self.num_chains)),
            "num_values": (self.num_chains, _MOST_VALUES),
            "num_colours": (1, len(COLOURS)),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not is_count(value) or not least <= value <= most:
                raise ConfigError(
                    got=f"{name}={value!r}", expected=f"{least} to {most}", do=f"correct {name}"
                )

    @property
    def chance(self) -> float:
        """Share of right answers of who knows the form of the text and follows no link: 1 / (C M).

        Chains are as long as one another and asked for equally often, whatever their order in the text; colours are
        drawn evenly. So, without links and the colour, each of C M answers is as likely.
        """
        return 1 / (self.num_chains * self.num_colours)

    def check_hops(self, *hops: int) -> None:
        """Refuses numbers of hops that no variable is away.

        Raises:
            ConfigError: There is one.
        """
        if not hops or not all(is_count(one) and one <= self.chain_length for one in hops):
            raise ConfigError(
                got=f"hops {hops}",
                expected=f"numbers from 1 to {self.chain_length}, the length of a chain",
                do="make longer chains",
            )

    def problem(self, draws: Draws) -> BindingProblem:
        """Draws chains, values and the order of the statements."""
        length = self.chain_length
        names = draws.some_of(VARIABLES, self.num_chains * length, "names")
        chains = tuple(names[first : first + length] for first in range(0, len(names), length))
        values = draws.some_of(range(self.num_values), self.num_chains, "values")
        places = [(chain, place) for chain in range(self.num_chains) for place in range(length)]
        return BindingProblem(chains, values, draws.some_of(places, len(places), "order"))

    def asking(self, variable: str, colour: int) -> list[str]:
        """Returns the words of a question, up to the token at which the answer is given."""
        return ["?", variable, ":" if self.num_colours == 1 else COLOURS[colour]]

    def answer(self, value: int, colour: int) -> str:
        """Returns the word of an answer: the value, or a number for the value and the colour together."""
        return str(value if self.num_colours == 1 else _FIRST_ANSWER + value * self.num_colours + colour)


@dataclass(frozen=True, kw_only=True)
class BindingDocuments(Bindings):
    """Training texts: every chain told, then some of them asked for, each with its answer.

    All texts have the same number of tokens, ``document_length``: with sequences of that length, each sequence is
    one text.

    Args:
        num_documents: How many, >= 1.
        trained_hops: Numbers of hops that are asked for; others are never asked for in training, though their
            variables are there.
        num_questions: Of each text, 1 to ``num_chains``; each asks for another chain, since a second one of the same
            chain would have the first one's answer.

    Raises:
        ConfigError: An option out of range.

    Example:
        >>> source = BindingDocuments(num_documents=1, num_chains=2, chain_length=2, trained_hops=(2,), num_questions=1)
        >>> next(source.documents()).text
        'me = mu . mu = 10 . lo = 4 . ma = lo . ? ma : 4 .'
    """

    name: ClassVar[str] = "binding"
    licence: ClassVar[str] = "Apache-2.0"

    num_documents: int
    trained_hops: tuple[int, ...] = (1, 2, 4)
    num_questions: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hops(*self.trained_hops)
        for name, most in (("num_documents", None), ("num_questions", self.num_chains)):
            value = getattr(self, name)
            if not is_count(value) or (most is not None and value > most):
                raise ConfigError(
                    got=f"{name}={value!r}",
                    expected="1 or more" if most is None else f"1 to {most}, the number of chains",
                    do=f"correct {name}",
                )

    @property
    def document_length(self) -> int:
        """Tokens of every text, the end of text before it included."""
        return 1 + 4 * self.num_chains * self.chain_length + 5 * self.num_questions

    def documents(self) -> Iterator[Document]:
        """Yields the texts in order of their index; text i depends on the options and i only."""
        for index in range(self.num_documents):
            draws = Draws(("binding", "train", self.seed, index))
            problem = self.problem(draws)
            words = problem.words()
            for place, chain in enumerate(draws.some_of(range(self.num_chains), self.num_questions, "asked")):
                hops = draws.one_of(self.trained_hops, "hops", place)
                colour = draws.below(self.num_colours, "colour", place)
                words += self.asking(problem.chains[chain][hops - 1], colour)
                words += [self.answer(problem.values[chain], colour), "."]
            yield Document(f"binding/{index}", " ".join(words))


class BindingItem(NamedTuple):
    """A text that ends where its only question is answered."""

    ids: tuple[int, ...]
    """Tokens, an end of text first; the answer is what follows the last."""
    answer: int
    """The id that is right."""
    candidates: tuple[int, ...]
    """The ids of all C M answers that some chain and some colour would have, the right one among them."""


@dataclass(frozen=True, kw_only=True)
class BindingItems(Bindings):
    """Questions for testing, with exact answers, drawn apart from the training texts.

    There are so many ways to name and order chains that none of a size worth asking for is drawn twice.

    Example:
        >>> items = BindingItems(num_chains=2, chain_length=2, num_values=8)
        >>> item = items.item(2, 0)
        >>> len(item.ids), len(item.candidates), items.chance
        (20, 2, 0.5)
    """

    def item(self, hops: int, index: int) -> BindingItem:
        """Makes one item.

        Args:
            hops: To the value, 1 to ``chain_length``.
            index: >= 0; the same index with other hops tells the same chains and asks for the same one.

        Raises:
            ConfigError: hops out of range.
        """
        self.check_hops(hops)
        draws = Draws(("binding", "test", self.seed, index))
        problem = self.problem(draws)
        chain = draws.below(self.num_chains, "asked")
        colour = draws.below(self.num_colours, "colour")
        ids = _ids(self.num_values, self.num_colours)
        words = problem.words() + self.asking(problem.chains[chain][hops - 1], colour)
        answers = [
            ids[self.answer(value, other)] for value in problem.values for other in range(self.num_colours)
        ]
        return BindingItem(
            (0, *(ids[word] for word in words)),
            ids[self.answer(problem.values[chain], colour)],
            tuple(answers),
        )


def binding_tokenizer(num_values: int = 16, num_colours: int = 1) -> Tokenizer:
    """Makes the tokenizer of texts and items of that size, with one id for each word.

    Example:
        >>> binding_tokenizer(num_values=4).decode([0, 1, 41, 45, 42])
        ' ba 0 = 1'
    """
    return word_tokenizer(tuple(_ids(num_values, num_colours)))


def _ids(num_values: int, num_colours: int) -> dict[str, int]:
    words = [*VARIABLES, *map(str, range(num_values)), "=", ".", "?"]
    if num_colours == 1:
        words.append(":")
    else:
        words += COLOURS[:num_colours]
        words += [str(_FIRST_ANSWER + number) for number in range(num_values * num_colours)]
    return {word: number for number, word in enumerate(words, start=1)}

"""Items of the planted-contradiction experiment: two upstream values crossed with two planted ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.problems import Kind, Problem, Split, check_options, draw_problem
from attention_residuals.data.synthetic.scales import SCALES
from attention_residuals.data.synthetic.stories import CHECK, CLAIM_PLACES, UNSAID, Story, tell
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.data.synthetic.words import REMARKS, VERDICTS, word_tokenizer
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, DataError, is_count, nearest

__all__ = ["Item", "StepItems", "step_tokenizer"]

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One item: four texts that differ in the upstream and the planted token, and what is true of them.

    ``ids[u, p]`` are the tokens with upstream value number u and planted value number p, from the end of text
    to the end of the answer. Texts with u = p are consistent. ``ids[u, 0]`` and ``ids[u, 1]``
    are a pair: they differ in the planted token only, so every later position holds the same token, and
    whatever a causal model computes before the plant is the same.

    ``rare[u, r]`` are consistent texts with remark number r in the free slot behind the claim, common ones
    first: two of them are a pair that differs in surprise, but not in truth.

    Args:
        name: Unique over all options.
        cluster: The template, by which items are clustered.
        ids: See above.
        rare: See above.
        places: Tokens by name: ``upstream``, ``plant``, ``remark`` and those of ``CLAIM_PLACES``; ``first claim``
            where an earlier claim is wrong.
        answers: Id of the right answer for each upstream value.
        claimed_answers: Id of the answer that would follow from each planted value.

    Raises:
        DataError: The texts do not align.

    Example:
        >>> item = StepItems(family="arithmetic").item(0)
        >>> bool((item.ids[0, 0] != item.ids[0, 1]).nonzero()[0] == item.places["plant"])
        True
    """

    name: str
    cluster: str
    ids: Ids
    rare: Ids
    places: Mapping[str, int]
    answers: tuple[int, int]
    claimed_answers: tuple[int, int]

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.shape[:2] != (2, 2) or self.rare.shape[::2] != self.ids.shape[::2]:
            raise self._misaligned(
                f"ids of shape {list(self.ids.shape)} and {list(self.rare.shape)}",
                "[2, 2, tokens] and [2, remarks, tokens] of the same length",
            )
        plant, remark, upstream = (self.places[place] for place in ("plant", "remark", "upstream"))
        # What follows from the statement: the answer, and what the wrong first claim is, where there is one.
        follows = {upstream, self.places["answer"] + 1, self.places.get("first claim", upstream)}
        for value in range(2):
            self._check(self.ids[value, 0], self.ids[value, 1], {plant}, "planted values")
            self._check(self.ids[0, value], self.ids[1, value], follows, "upstream values")
            for text in self.rare[value]:
                self._check(text, self.ids[value, value], {remark}, "remarks")
        late = [place for place in CLAIM_PLACES if self.places[place] <= plant]
        if late or upstream >= plant:
            raise self._misaligned(f"places {dict(self.places)}", "upstream < plant < every place of claims")

    def _check(self, one: Ids, other: Ids, allowed: set[int], what: str) -> None:
        differing = set(np.flatnonzero(one != other).tolist())
        if not differing <= allowed or (what == "planted values" and not differing):
            raise self._misaligned(
                f"texts of two {what} that differ at tokens {sorted(differing)}",
                f"a difference at {sorted(allowed)} and nowhere else",
            )

    def _misaligned(self, got: str, expected: str) -> DataError:
        return DataError(
            got=f"item {self.name}: {got}",
            expected=expected,
            do="make every edit one token, and every text after the claim the same for both planted values",
        )


@dataclass(frozen=True, kw_only=True)
class StepItems:
    """Items of one family, a pure function of these options and an index.

    Kinds of claim, for the experiment and its controls:

    - ``derived``: the claim follows from the statement in one step. Later steps go on from the claim.
    - ``copied``: the claim repeats the statement, so a wrong one contradicts it on the surface.
    - ``irrelevant``: as derived, but the answer depends on another statement.
    - ``corrected``: a wrong claim was made, and a second one repeats it (u != p) or mends it (u = p): the
      reversed direction. The second claim is the planted one.

    Args:
        family: ``arithmetic``, ``variables``, ``entities`` or ``calendar``.
        kind: What is claimed.
        split: ``pilot`` or ``confirm``; no problem is in both, or in training texts.
        distance: Steps from the statement to the planted claim, 1 for the next step.
        num_steps: Statements before the claim, >= distance; more are harder.
        num_values: Values that a claim may take, >= 2; more are harder. Cycles such as weekdays take all of
            theirs, and short ranges fewer.
        max_move: Largest move of one step, >= 1; larger is harder. Days and months move by 5 at most, places by 3.
        template: Name of a template; default one of those of training for each item.
        seed: >= 0.

    Raises:
        ConfigError: An option that does not exist or is out of range.

    Example:
        >>> items = StepItems(family="variables", template="copies", distance=1, num_steps=2)
        >>> print(items.text(items.item(0).ids[0, 1]))
        set j to cow . set t to cow . copy t into r so r is ant indeed . copy r into c . check unsaid . so c is cow .
    """

    family: str
    kind: Kind = "derived"
    split: Split = "pilot"
    distance: int = 2
    num_steps: int = 4
    num_values: int = 8
    max_move: int = 9
    template: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(
            family=self.family,
            kind=self.kind,
            num_steps=self.num_steps,
            num_values=self.num_values,
            max_move=self.max_move,
            distance=self.distance,
        )
        if self.split not in ("pilot", "confirm"):
            raise ConfigError(
                got=f"split={self.split!r}",
                expected="'pilot' or 'confirm'",
                do="take training texts from StepDocuments",
            )
        names = [template.name for template in FAMILIES[self.family].templates]
        if self.template is not None and self.template not in names:
            raise ConfigError(
                got=f"template={self.template!r}",
                expected=f"a template of {self.family}",
                do=nearest(self.template, names),
            )

    def template_of(self, index: int) -> Template:
        """Gives the template of an item: the one that was named, or those of training in turn."""
        family = FAMILIES[self.family]
        if self.template is None:
            return family.trained[index % len(family.trained)]
        return next(template for template in family.templates if template.name == self.template)

    def item(self, index: int) -> Item:
        """Makes one item; the same options and index give the same item on every machine.

        Templates with the same kind of values tell the same problem at the same index, so naming a held-out
        template gives paraphrases.

        Args:
            index: >= 0.

        Raises:
            ConfigError: The index is negative.
        """
        if index < 0:
            raise ConfigError(got=f"index={index}", expected="index >= 0", do="count items from 0")
        template = self.template_of(index)
        problem = self._problem(index, template)
        told = [self._tell(template, problem, u, p) for u in range(2) for p in range(2)]
        rare = [self._tell(template, problem, u, u, remark) for u in range(2) for remark in REMARKS]
        consistent = told[0], told[3]
        right = [_id(story.answer) for story in consistent]
        claimed = [_id(story.claimed_answer) for story in consistent]
        return Item(
            name=f"{self.family}/{template.name}/{self.kind}/{self.split}/{self.distance}/{self.seed}/{index}",
            cluster=template.name,
            ids=_ids(told).reshape(2, 2, -1),
            rare=_ids(rare).reshape(2, len(REMARKS), -1),
            places=told[0].places,
            answers=(right[0], right[1]),
            claimed_answers=(claimed[0], claimed[1]),
        )

    def items(self, number: int, *, first: int = 0) -> Iterator[Item]:
        """Makes several items in a row.

        Args:
            number: How many, >= 1.
            first: Index of the first.

        Raises:
            ConfigError: The number is below 1.
        """
        if not is_count(number):
            raise ConfigError(got=f"number={number}", expected="number >= 1", do="ask for 100")
        return (self.item(index) for index in range(first, first + number))

    def text(self, ids: Ids) -> str:
        """Turns ids back into words."""
        return step_tokenizer().decode(ids).strip()

    def _problem(self, index: int, template: Template) -> Problem:
        return draw_problem(
            Draws((self.split, self.seed, self.family, index)),
            self.family,
            template,
            split=self.split,
            num_steps=self.num_steps,
            num_values=self.num_values,
            max_move=self.max_move,
        )

    def _tell(self, template: Template, problem: Problem, u: int, p: int, remark: str | None = None) -> Story:
        value, planted = problem.pair[u], problem.pair[p]
        claimed = (problem.pair[1 - u], planted) if self.kind == "corrected" else (planted,)
        return tell(
            template,
            problem,
            kind=self.kind,
            distance=self.distance,
            value=value,
            claimed=claimed,
            remark=remark,
        )


def _ids(stories: list[Story]) -> Ids:
    tokenizer = step_tokenizer()
    rows = tokenizer.encode_batch([" ".join(story.words) for story in stories])
    return np.insert(np.stack(rows), 0, tokenizer.end_of_text, axis=1)


def _id(word: str) -> int:
    return int(step_tokenizer().encode(word)[0])


@cache
def step_tokenizer() -> Tokenizer:
    """Makes the tokenizer of all step-by-step texts: one id for each word that any of them may use.

    Example:
        >>> step_tokenizer()
        Tokenizer(vocab_size=295)
        >>> step_tokenizer().decode(step_tokenizer().encode("anna wears red coat ."))
        ' anna wears red coat .'
    """
    words = {CHECK, UNSAID, ".", *VERDICTS, *REMARKS}
    for scale in SCALES.values():
        words.update(scale.words)
    for family in FAMILIES.values():
        words.update(family.things)
        for template in family.templates:
            words.update(template.words)
    return word_tokenizer(tuple(sorted(words)))

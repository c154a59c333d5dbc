"""Training texts: consistent stories, and a stated share in which it pays to notice that one is not.

Five things follow the steps of a text. The **verdict** says ``fine`` or ``conflict``: to predict it, a model has
to compare the claim with what was stated, in every text. In some texts it stays unsaid, as in all items;
in some the last claim has its own right behind it, where comparing is easier to learn than at a distance. The
**answer** follows from the statements, never from a claim that contradicts them: where most claims are right,
going on from the claim is a good habit, and going back to the statement is a better one. The **recap** says the
true value of every thing once more, in any order: looking a value up by its thing is what all else is built on,
and the steps of a text hardly teach it. The **graded recap** says a value of every thing with a verdict on it, and
after ``conflict`` the true one: comparing is the other half. The **facts** move values without any thing, as in
``9 plus 2 is 11``; a claim needs that besides. Other texts tell no story (``lists.py``); a course of lessons says
how many, and when.

Only some words count in the loss: claimed values, remarks, answers, verdicts, values that are said again, true
values after a wrong one, results of facts, parts of echoes but for their first words. All others are drawn at
random, or always follow, and to predict those teaches nothing that is asked here: with all words scored, a small
model takes many times as long to prefer values that stand in the text. So the models predict nothing of use at
other words.

The verdict comes before the answer: a claim, the step from it and the right answer would give it away. Up to the
verdict, texts that state another value but claim the same differ in the stated token only, so no reader who leaves
the statement out is right more often than by chance.

Nothing but the contradiction tells a wrong claim from a right one: both values of a claim are drawn alike,
wrong claims come as often with every template, thing, value, move, remark, kind and distance, and half of the
values that are stated of other things are the right or the wrong one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

from attention_residuals.data.sources import Document
from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.lessons import Lesson
from attention_residuals.data.synthetic.lists import (
    Told,
    echo,
    graded,
    graded_pairs,
    listing,
    matches,
    pairs,
    recalled,
)
from attention_residuals.data.synthetic.problems import Kind, check_options, draw_problem
from attention_residuals.data.synthetic.stories import Story, tell
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.errors import ConfigError, is_count

__all__ = ["KIND_TWENTIETHS", "NUM_FACTS", "StepDocuments"]

NUM_FACTS = 3
"""Facts at the end of each text whose values move."""

_DETERMINED = ("first claim", "plant", "remark")
"""Places in a story whose words count in the loss, besides its answer."""

KIND_TWENTIETHS: dict[Kind, int] = {"derived": 10, "copied": 4, "irrelevant": 4, "corrected": 2}
"""How many of 20 texts make each kind of claim."""


@dataclass(frozen=True, kw_only=True)
class StepDocuments:
    """Step-by-step texts with answers and verdicts, as a source for ``prepare``.

    Templates that are held out, and problems of the pilot and of the confirming run, never occur. Families,
    templates, numbers of steps and distances are drawn uniformly, kinds of claim by ``KIND_TWENTIETHS``.

    Args:
        num_documents: How many, >= 1.
        inconsistent_share: Share of stories with a wrong claim, and of wrong values that are graded, 0 to 1. 0 gives
            models that never saw one.
        families: Which families; default all.
        max_steps: Most statements before a claim, >= 2; there are at least 2.
        num_values: Values that a claim may take, >= 2; items should use the same.
        max_move: Largest move of one step, >= 1; items should use the same.
        course: What the texts are, in a row; by default 2 in 5 are lists and the others stories, from the first on.
            A trainer with ``shuffled_within`` visits them about in that order.
        said_share: Share of the stories that say their verdict, 0 to 1.
        marked_share: Share of the stories whose last claim has its own verdict right behind it, in place of the
            remark, 0 to 1.
        seed: >= 0.

    Raises:
        ConfigError: An option that does not exist or is out of range.

    Example:
        >>> import textwrap
        >>> source = StepDocuments(num_documents=1, families=("arithmetic",), max_steps=3)
        >>> for document in source.documents():
        ...     print(textwrap.fill(document.text, 90))
        t is 16 . f is 14 . e is f plus 4 so e is 18 fine . m is e plus 4 . check fine . so m is
        22 . e is still 18 . m is still 22 . t is still 16 . f is still 14 . t is still 16 fine .
        m is still 22 fine . e is still 18 fine . f is still 14 fine . 29 plus 8 is 37 . 10 plus 7
        is 17 . 23 plus 4 is 27 .
    """

    name: ClassVar[str] = "step-by-step"
    licence: ClassVar[str] = "Apache-2.0"

    num_documents: int
    inconsistent_share: float = 0.25
    families: tuple[str, ...] = tuple(FAMILIES)
    max_steps: int = 4
    num_values: int = 8
    max_move: int = 9
    course: tuple[Lesson, ...] = (Lesson(lists=0.4),)
    said_share: float = 0.75
    marked_share: float = 1 / 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.num_documents):
            raise ConfigError(
                got=f"num_documents={self.num_documents}", expected="1 or more", do="pass 50_000"
            )
        for name in ("inconsistent_share", "said_share", "marked_share"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ConfigError(got=f"{name}={share}", expected="0 to 1", do="pass 0.25")
        if not self.course or not all(isinstance(lesson, Lesson) for lesson in self.course):
            raise ConfigError(
                got=f"course={self.course!r}", expected="one lesson or more", do="pass (Lesson(lists=0.4),)"
            )
        if not self.families:
            raise ConfigError(got="families=()", expected="one or more", do="leave it out to have all four")
        for family in self.families:
            check_options(
                family=family,
                kind="irrelevant",
                num_steps=self.max_steps,
                num_values=self.num_values,
                max_move=self.max_move,
                distance=1,
            )

    def documents(self) -> Iterator[Document]:
        """Yields the texts in order of their index; text i depends on the options and i only."""
        for index in range(self.num_documents):
            plain = self._without_story(index)
            if plain is not None:
                yield plain
                continue
            family, template, story = self.story(index)
            draws = Draws(("recap", self.seed, index))
            determined = {story.places[place] - 1 for place in _DETERMINED if place in story.places}
            determined.add(story.places["answer"])  # the word after the place that predicts it
            told = [(word, number in determined) for number, word in enumerate(story.words)]
            if draws.share("marked") < self.marked_share:
                told[story.places["remark"] - 1] = (story.last_verdict, True)
            if draws.share("said") < self.said_share:
                told[story.places["check"]] = (story.verdict, True)
            recapped = draws.some_of(story.truths, len(story.truths), "recap")
            told += recalled(template.again, recapped)
            asked = draws.some_of(story.truths, len(story.truths))
            told += graded(draws, template.again, asked, self.inconsistent_share)
            told += self._facts(draws, template)
            yield _document(family, template, told)

    def story(self, index: int) -> tuple[str, Template, Story]:
        """Gives the family, the template and the story of one text.

        Args:
            index: >= 0.
        """
        draws = Draws(("train", self.seed, index))
        family = draws.one_of(self.families, "family")
        template = draws.one_of(FAMILIES[family].trained, "template")
        kinds = [kind for kind, twentieths in KIND_TWENTIETHS.items() for _ in range(twentieths)]
        kind = draws.one_of(kinds, "kind")
        num_steps = 2 + draws.below(self.max_steps - 1, "steps")
        problem = draw_problem(
            draws,
            family,
            template,
            split="train",
            num_steps=num_steps,
            num_values=self.num_values,
            max_move=self.max_move,
        )
        distance = 1 + draws.below(num_steps, "distance") + (kind == "corrected")
        right, wrong = problem.pair
        is_wrong = draws.share("wrong") < self.inconsistent_share
        claimed: tuple[int, ...] = (wrong if is_wrong else right,)
        if kind == "corrected":
            wrong_ones = ((wrong, right), (wrong, wrong), (right, wrong))
            claimed = draws.one_of(wrong_ones, "which") if is_wrong else (right, right)
        story = tell(template, problem, kind=kind, distance=distance, value=right, claimed=claimed)
        return family, template, story

    def _without_story(self, index: int) -> Document | None:
        """Tells a text of another kind than a story, where this is one."""
        draws = Draws(("list", self.seed, index))
        kind = self.lesson(index).kind(draws.share("kind"))
        if kind is None:
            return None
        family = draws.one_of(self.families, "family")
        template = draws.one_of(FAMILIES[family].trained, "template")
        wrong_share = self.inconsistent_share
        told = {
            "echoes": partial(echo, draws, family, template),
            "matches": partial(matches, draws, family, template, wrong_share),
            "pairs": partial(pairs, draws, family, template),
            "graded_pairs": partial(graded_pairs, draws, family, template, wrong_share),
            "lists": partial(listing, draws, family, template, wrong_share),
        }[kind]
        return _document(family, template, list(told()))

    def lesson(self, index: int) -> Lesson:
        """Gives the lesson that a text belongs to.

        Args:
            index: >= 0.
        """
        ends = accumulate(lesson.num_documents for lesson in self.course)
        return next((own for end, own in zip(ends, self.course, strict=True) if index < end), self.course[-1])

    def _facts(self, draws: Draws, template: Template) -> Iterator[Told]:
        """Tells some moves of the template's values, in its directions, among all values that its texts state."""
        scale = template.values.with_moves_up_to(self.max_move)
        if not scale.max_offset:
            return
        values = scale.values(self.num_values)
        beyond = 0 if scale.cyclic else scale.max_offset
        told = range(values[0] - beyond, values[-1] + beyond + 1)
        for place in range(NUM_FACTS):
            sign = draws.one_of((template.claim_sign, template.next_sign), "sign", place)
            move = 1 + draws.below(scale.max_offset, "move", place)
            value = draws.one_of(told, "value", place)
            moved = scale.words[scale.shifted(value, sign * move)]
            fact = scale.facts[sign < 0].format(value=scale.words[value], k=move, moved=moved)
            *words, last = fact.split()
            yield from ((word, False) for word in words)
            yield from ((last, True), (".", False))


def _document(family: str, template: Template, told: list[Told]) -> Document:
    """Puts words together, with the ranges of those that are scored."""
    scored, at = [], 0
    for word, is_scored in told:
        if is_scored:
            scored.append((at, at + len(word)))
        at += len(word) + 1
    text = " ".join(word for word, _ in told)
    return Document(f"{family}/{template.name}", text, scored=tuple(scored))

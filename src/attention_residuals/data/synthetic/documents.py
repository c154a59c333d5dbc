"""Training texts: consistent stories, and a stated share in which it pays to notice that one is not.

Three things follow the steps of a text. The **answer** follows from the statements, never from a claim that
contradicts them: in the default mixture 75 % of claims are right, so going on from the claim is a good habit,
and going back to the statement is a better one. The **verdict** says ``fine`` or ``conflict``: to predict it, a
model has to compare the claim with what was stated, in every text. The **recap** says the true value of every
thing once more, in any order: it is there because looking a value up by its thing is what all else is built
on, and a text has only three tokens that teach it otherwise. Items end before verdict and recap.

The verdict comes after the answer, and the answer follows from the statements, so the two texts of a pair
hold the same tokens from the claim to the end, the answer included.

Nothing but the contradiction tells a wrong claim from a right one: both values of a claim are drawn alike,
wrong claims come as often with every template, thing, value, move, remark, kind and distance, and half of the
values that are stated of other things are the right or the wrong one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attention_residuals.data.sources import Document
from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.families import FAMILIES
from attention_residuals.data.synthetic.problems import Kind, check_options, draw_problem
from attention_residuals.data.synthetic.stories import Story, tell
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.errors import ConfigError, is_count

__all__ = ["KIND_TWENTIETHS", "StepDocuments"]

KIND_TWENTIETHS: dict[Kind, int] = {"derived": 10, "copied": 4, "irrelevant": 4, "corrected": 2}
"""How many of 20 texts make each kind of claim."""


@dataclass(frozen=True, kw_only=True)
class StepDocuments:
    """Step-by-step texts with answers and verdicts, as a source for ``prepare``.

    Templates that are held out, and problems of the pilot and of the confirming run, never occur. Families,
    templates, numbers of steps and distances are drawn uniformly, kinds of claim by ``KIND_TWENTIETHS``.

    Args:
        num_documents: How many, >= 1.
        inconsistent_share: Share of texts with a wrong claim, 0 to 1. 0 gives models that never saw one.
        families: Which families; default all.
        max_steps: Most statements before a claim, >= 2; there are at least 2.
        num_values: Values that a claim may take, >= 2; items should use the same.
        seed: >= 0.

    Raises:
        ConfigError: An option that does not exist or is out of range.

    Example:
        >>> source = StepDocuments(num_documents=2, families=("arithmetic",), max_steps=3)
        >>> for document in source.documents():
        ...     story, rest = document.text.split(" check ")
        ...     print(story)
        ...     print(rest)
        t is 16 . f is 14 . e is f plus 4 so e is 18 here . m is e plus 4 . so m is 22 .
        fine . t is still 16 . m is still 22 . e is still 18 . f is still 14 .
        let d = 23 . let b = 23 . let e = 24 . again d = 24 today . let s = d + 4 . then s = 27 .
        conflict . again s = 27 . again b = 23 . again d = 23 . again e = 24 .
    """

    name: ClassVar[str] = "step-by-step"
    licence: ClassVar[str] = "Apache-2.0"

    num_documents: int
    inconsistent_share: float = 0.25
    families: tuple[str, ...] = tuple(FAMILIES)
    max_steps: int = 4
    num_values: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.num_documents):
            raise ConfigError(
                got=f"num_documents={self.num_documents}", expected="1 or more", do="pass 50_000"
            )
        if not 0 <= self.inconsistent_share <= 1:
            raise ConfigError(
                got=f"inconsistent_share={self.inconsistent_share}", expected="0 to 1", do="pass 0.25"
            )
        if not self.families:
            raise ConfigError(got="families=()", expected="one or more", do="leave it out to have all four")
        for family in self.families:
            check_options(
                family=family,
                kind="irrelevant",
                num_steps=self.max_steps,
                num_values=self.num_values,
                distance=1,
            )

    def documents(self) -> Iterator[Document]:
        """Yields the texts in order of their index; text i depends on the options and i only."""
        for index in range(self.num_documents):
            family, template, story = self.story(index)
            things = Draws(("recap", self.seed, index)).some_of(story.truths, len(story.truths))
            recap = [f"{template.again.format(name=name, plant=value)} ." for name, value in things]
            text = " ".join((*story.words, story.verdict, ".", *recap))
            yield Document(f"{family}/{template.name}", text)

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
            draws, family, template, split="train", num_steps=num_steps, num_values=self.num_values
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

"""A problem told in a template's words: who has what, a claim, a step after it, the verdict, the answer."""

from typing import NamedTuple

from attention_residuals.data.synthetic.problems import Kind, Problem
from attention_residuals.data.synthetic.templates import Template
from attention_residuals.data.synthetic.words import VERDICTS

__all__ = ["CHECK", "CLAIM_PLACES", "UNSAID", "Story", "tell"]

CHECK = "check"
"""The word after which the verdict stands."""

UNSAID = "unsaid"
"""What stands in place of a verdict that is not told."""

CLAIM_PLACES = ("step end", "next operand", "check", "answer")
"""Places after the plant whose tokens are the same in both texts of a pair, where findings may be claimed:
the end of the claim, the thing that the next step goes on from, the token that predicts the verdict, and the
one that predicts the answer."""


class Story(NamedTuple):
    """A text up to its answer, with the verdict unsaid, and what is true of it."""

    words: tuple[str, ...]
    places: dict[str, int]
    """Tokens by name, counted from 1, since the end of text before it is token 0: ``upstream``, ``plant``,
    ``remark``, those of ``CLAIM_PLACES``, and ``first claim`` where there are two."""
    answer: str
    """The answer in the text, which follows from the statements, not from the claim."""
    claimed_answer: str
    """The answer that would follow from the last claim."""
    verdict: str
    """``fine``, or ``conflict`` where a claim contradicts the statements."""
    last_verdict: str
    """The same of the last claim alone."""
    truths: tuple[tuple[str, str], ...]
    """Every thing with its true value: those stated, the one claimed, the last one."""


def tell(
    template: Template,
    problem: Problem,
    *,
    kind: Kind,
    distance: int,
    value: int,
    claimed: tuple[int, ...],
    remark: str | None = None,
) -> Story:
    """Tells a problem; see ``StepItems`` for the kinds.

    Args:
        template: In whose words.
        problem: What it is about.
        kind: What is claimed.
        distance: Steps from the statement to the last claim.
        value: What the claim should say by the statements.
        claimed: What it does say; two claims for ``corrected``.
        remark: Word of the free slot; default the problem's.
    """
    scale, written = template.values, _Words()
    stated = _state(written, template, problem, kind, distance, value)

    remarks = (*problem.remarks[: len(claimed) - 1], remark or problem.remarks[-1])
    for number, (said, word) in enumerate(zip(claimed, remarks, strict=True)):
        name = problem.main if kind == "copied" else problem.new
        if kind != "copied" and number == 0:
            slots = {"new": name, "name": problem.main, "k": str(problem.first_move)}
            written.add(template.claim, plant=scale.words[said], **slots)
            if len(claimed) > 1:
                written.places["first claim"] = written.slots["plant"]
        else:
            written.add(template.again, plant=scale.words[said], name=name)
        written.end(word)

    asked, known, believed = problem.new, value, claimed[-1]
    if kind == "copied":
        asked = problem.main
    elif kind == "irrelevant":
        asked = problem.sides[problem.asked_side]
        known = believed = _stated(template, problem, kind, problem.side_values[problem.asked_side])
    move = template.next_sign * problem.second_move
    written.add(template.next, last=problem.last, asked=asked, m=str(problem.second_move))
    written.end()
    written.add(CHECK)  # before the answer, which with the claim gives the verdict away
    written.mark("check")
    written.add(UNSAID)
    written.end()
    written.add(template.answer, last=problem.last)
    written.mark("answer")
    answer = scale.words[scale.shifted(known, move)]
    derived = () if kind == "copied" else ((problem.new, scale.words[value]),)
    written.add(answer)
    written.end()
    return Story(
        words=tuple(written.words),
        places=written.places,
        answer=answer,
        claimed_answer=scale.words[scale.shifted(believed, move)],
        verdict=VERDICTS[any(said != value for said in claimed)],
        last_verdict=VERDICTS[claimed[-1] != value],
        truths=(*stated, *derived, (problem.last, answer)),
    )


def _state(
    written: "_Words", template: Template, problem: Problem, kind: Kind, distance: int, value: int
) -> list[tuple[str, str]]:
    """Writes the statements, the main one where the distance says; returns what they state."""
    words, sides = template.values.words, iter(zip(problem.sides, problem.side_values, strict=True))
    num_steps, truths = len(problem.sides) + 1, []
    last_claim = num_steps + (kind == "corrected")
    for step in range(num_steps):
        is_main = step == last_claim - distance
        name, derived = (problem.main, value) if is_main else next(sides)
        stated = words[_stated(template, problem, kind, derived)]
        written.add(template.statement, name=name, value=stated, extra=words[problem.extras[step]])
        if is_main:
            written.places["upstream"] = written.slots["value"]
        written.end()
        truths.append((name, stated))
    return truths


def _stated(template: Template, problem: Problem, kind: Kind, value: int) -> int:
    """What a statement says from which a claim derives a value; a copy derives nothing."""
    if kind == "copied":
        return value
    return template.values.shifted(value, -template.claim_sign * problem.first_move)


class _Words:
    """Words in a row, with the places of those that matter."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.places: dict[str, int] = {}
        self.slots: dict[str, int] = {}

    def add(self, sentence: str, **slots: str) -> None:
        """Adds a sentence with its slots filled in."""
        for word in sentence.split():
            if word.startswith("{"):
                slot = word.strip("{}")
                word = slots[slot]
                self.slots[slot] = len(self.words) + 1
            self.words.append(word)

    def mark(self, place: str) -> None:
        """Names the last word."""
        self.places[place] = len(self.words)

    def end(self, remark: str | None = None) -> None:
        """Ends a sentence; after a claim with a remark before the end."""
        if remark is not None:
            self.places["plant"] = self.slots["plant"]
            self.words.append(remark)
            self.mark("remark")
        self.words.append(".")
        if remark is not None:
            self.mark("step end")
        if "asked" in self.slots:
            self.places.setdefault("next operand", self.slots["asked"])

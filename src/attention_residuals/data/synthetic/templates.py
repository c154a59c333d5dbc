"""What a template is: the five sentences in which a family tells its stories, filled in by ``stories``.

- ``statement`` gives a thing (``{name}``) its ``{value}``;
- ``claim`` derives a new thing from a stated one and says what its value is (``{plant}``);
- ``again`` says the value of a thing once more, without deriving anything;
- ``next`` derives the last thing (``{last}``) from one that was stated or claimed (``{asked}``);
- ``answer`` ends where the value of the last thing would follow.
"""

from dataclasses import dataclass

from attention_residuals.data.synthetic.scales import SCALES, Scale

__all__ = ["Family", "Template"]


@dataclass(frozen=True, kw_only=True)
class Template:
    """The sentences of one way to tell a story; see the module.

    Args:
        name: Unique over all families.
        scale: The key of its values in ``SCALES``.
        statement: With {name} and {value}, and perhaps {extra}, the value of another attribute.
        claim: With {new}, {name} and {plant}, and {k} where values move.
        again: With {name} and {plant}.
        next: With {last} and {asked}, and {m} where values move.
        answer: With or without {last}.
        claim_sign: 1 where a claim adds its offset, -1 where it subtracts it.
        next_sign: The same for the next step.
        held_out: Never in training texts.
    """

    name: str
    scale: str
    statement: str
    claim: str
    again: str
    next: str
    answer: str
    claim_sign: int = 1
    next_sign: int = 1
    held_out: bool = False

    @property
    def words(self) -> frozenset[str]:
        """The words of its sentences, without what fills the slots."""
        sentences = (self.statement, self.claim, self.again, self.next, self.answer)
        return frozenset(word for one in sentences for word in one.split() if not word.startswith("{"))

    @property
    def values(self) -> Scale:
        """The values that the sentences speak of."""
        return SCALES[self.scale]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Templates whose stories are about the same things.

    Args:
        things: What has values, one word each.
        templates: In order; the held-out ones last.
    """

    things: tuple[str, ...]
    templates: tuple[Template, ...]

    @property
    def trained(self) -> tuple[Template, ...]:
        """The templates of training texts."""
        return tuple(template for template in self.templates if not template.held_out)

"""What part of a course in step-by-step texts teaches: a mixture of kinds of text."""

from dataclasses import dataclass, fields

from attention_residuals.errors import ConfigError, is_count

__all__ = ["Lesson"]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Some texts in a row and what shares of them are; the others are stories.

    Small models learn to look a value up, and later to compare it with what is said, soonest from texts that ask
    for that alone; the README of the contradiction study has the pilots.

    Args:
        num_documents: How many texts, >= 1; the last lesson of a course goes on to its end.
        echoes: Share of rows of words of which parts are said again, 0 to 1.
        matches: Share of words in twos with a verdict on whether they are the same.
        pairs: Share of things and values that are said and said again, without a sentence.
        graded_pairs: The same with a verdict on each that is said again.
        lists: Share of statements whose values are said again, or graded. All shares add up to 1 at most.

    Raises:
        ConfigError: A share below 0, or more than 1 together.

    Example:
        >>> Lesson(num_documents=1000, lists=0.4).stories
        0.6
    """

    num_documents: int = 1
    echoes: float = 0.0
    matches: float = 0.0
    pairs: float = 0.0
    graded_pairs: float = 0.0
    lists: float = 0.0

    def __post_init__(self) -> None:
        if not is_count(self.num_documents):
            raise ConfigError(
                got=f"num_documents={self.num_documents!r}",
                expected="1 or more",
                do="pass num_documents=1000",
            )
        if min(self.shares.values()) < 0 or sum(self.shares.values()) > 1 + 1e-9:
            raise ConfigError(
                got=f"shares {self.shares}",
                expected="each 0 or more, together 1 at most",
                do="pass lists=0.4: the others are stories",
            )

    @property
    def shares(self) -> dict[str, float]:
        """Shares of texts without a story, by kind."""
        names = [field.name for field in fields(self) if field.name != "num_documents"]
        return {name: getattr(self, name) for name in names}

    @property
    def stories(self) -> float:
        """Share of stories."""
        return 1.0 - sum(self.shares.values())

    def kind(self, drawn: float) -> str | None:
        """Tells which kind of text a number from 0 to 1 stands for; None is a story."""
        for name, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return name
        return None

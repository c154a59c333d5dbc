"""What a page is made of: recorded passes, and what was measured beside them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.page.report import Section
from attention_residuals.trace import LensReading, Receipt, Swept, Trace

__all__ = ["PageContent", "Recorded"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """One recorded pass, with what the model predicted.

    Args:
        trace: What was read.
        name: For people, such as ``"without B2"``; short.
        logits: What the model predicted at each token.
        lens: What it would have predicted at each site.

    Raises:
        ShapeError: Logits or a lens of other tokens.
    """

    trace: Trace
    name: str = ""
    logits: Float[Tensor, "B T V"] | None = None
    lens: LensReading | None = None

    def __post_init__(self) -> None:
        shape = list(self.trace.tokens.shape)
        others = {
            "logits": None if self.logits is None else list(self.logits.shape[:2]),
            "a lens": None if self.lens is None else list(self.lens.top_tokens.shape[1:3]),
        }
        for what, found in others.items():
            if found not in (None, shape):
                raise ShapeError(
                    got=f"{what} of {found} tokens beside a trace of {shape}",
                    expected="the same tokens",
                    do="run both on the same text",
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class PageContent:
    """All that a page shows.

    With ``first`` alone it shows one pass; with ``second`` it compares two; ``control`` says how large a
    difference is that means nothing. Sections alone are a report, and stand before the views of a trace.

    Args:
        first: The pass that is looked at.
        second: Another text, another model, or the same text with an edit.
        control: A pass with a change that should not matter, of the same size as that of ``second``.
        effects: Of a sweep over edits of the first pass.
        receipts: Of the edits that were made in the second pass.
        spell: Names token ids, such as ``tokenizer.tokens``; predictions are shown as ids without it.
        title: Of the page.
        lead: A paragraph that says what is to be seen.
        sections: Texts, tables and figures.
        about: What it all comes from; facts of the trace are added.

    Raises:
        ConfigError: Nothing to show, or a second pass without a first, a control without a second.
    """

    first: Trace | Recorded | None = None
    second: Trace | Recorded | None = None
    control: Trace | Recorded | None = None
    effects: Sequence[Swept] = ()
    receipts: Sequence[Receipt] = ()
    spell: Callable[[Sequence[int]], Sequence[str]] | None = None
    title: str = ""
    lead: str = ""
    sections: Sequence[Section] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [part is not None for part in (self.first, self.second, self.control)]
        if given != sorted(given, reverse=True) or not (given[0] or self.sections or self.lead):
            names = [name for name, there in zip(("first", "second", "control"), given, strict=True) if there]
            raise ConfigError(
                got=f"{', '.join(names) or 'no pass'} and {len(self.sections)} sections",
                expected="a first pass before a second, a second before a control, or a report without any",
                do="pass first=trace",
            )

    @property
    def recorded(self) -> tuple[Recorded, ...]:
        """The passes that there are, in order, each with a name."""
        parts = [part for part in (self.first, self.second, self.control) if part is not None]
        passes = [part if isinstance(part, Recorded) else Recorded(trace=part) for part in parts]
        names = ("A", "B", "control") if len(passes) > 1 else ("",)
        return tuple(
            Recorded(trace=one.trace, name=one.name or name, logits=one.logits, lens=one.lens)
            for one, name in zip(passes, names, strict=False)
        )

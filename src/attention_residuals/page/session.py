"""What the live page asks a model: the routing of a text, edits of it, generation, and two texts compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_residuals.configs import decode
from attention_residuals.errors import ConfigError, DataError, is_count
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.tap import Chain, Onlooker, Read, Tap, Write
from attention_residuals.models.weights import fingerprint
from attention_residuals.page.content import PageContent, Recorded
from attention_residuals.page.document import html
from attention_residuals.page.jobs import Check, Event, Work
from attention_residuals.page.payload import payload
from attention_residuals.trace import (
    Intervention,
    LensReading,
    Receipt,
    Recorder,
    decode_edits,
    divergence,
    lens,
    trace_bytes,
)

__all__ = ["EXAMPLE", "KINDS", "Compare", "Generate", "Session", "TraceText"]

EXAMPLE = "def mean(values):\n    return sum(values) / len(values)\n"
"""What the page shows first."""

_NUM_TOP = 5
_MAX_BYTES = 2**30
_MAX_NEW_TOKENS = 1024
_LENS_WORK = 2 * 10**10
"""Multiplications, of which two cores do so many in about a second."""


@dataclass(frozen=True, kw_only=True)
class TraceText:
    """Asks for the routing of a text.

    Args:
        text: What the model reads, after the mark that ends the text before.
        edits: Edits as files of edits hold them; none: the model as it is.
    """

    text: str
    edits: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Asks for a continuation, and for the routing of the whole text.

    Args:
        text: What to continue; an empty one begins a new text.
        edits: Act in all passes of the generation.
        max_new_tokens: 1 to 1024; a text that fills the model's context ends too.
        temperature: 0 takes the likeliest token, 1 draws as the model predicts.
        seed: Decides what is drawn, 0 to 2**63 - 1.
    """

    text: str
    edits: tuple[object, ...] = ()
    max_new_tokens: int = 32
    temperature: int | float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.max_new_tokens) or self.max_new_tokens > _MAX_NEW_TOKENS:
            raise ConfigError(
                got=f"max_new_tokens={self.max_new_tokens}",
                expected=f"1 to {_MAX_NEW_TOKENS}",
                do="generate less at a time, and go on from there",
            )


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Asks for the routing of two texts, token beside token.

    Args:
        text: One of them.
        other: Another of as many tokens.
    """

    text: str
    other: str


KINDS: dict[str, type] = {"compare": Compare, "generate": Generate, "trace": TraceText}
"""What the page may ask, by name."""


class Session:
    """Answers what the page asks about one model.

    Args:
        engine: The model and its tokenizer.
        name: Of the model, for people.

    Raises:
        ConfigError: An engine without a tokenizer.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        if engine.tokenizer is None:
            raise ConfigError(
                got="an engine without a tokenizer", expected="one that reads texts", do="pass a tokenizer"
            )
        self.engine, self.tokenizer, self.model, self.name = engine, engine.tokenizer, engine.model, name
        self.checkpoint = fingerprint(self.model)
        one, two = (trace_bytes(self.model, count) for count in (1, 2))
        logits = 16 * self.model.config.vocab_size  # those of two passes, and their logarithms
        self.max_tokens = min(self.model.config.max_tokens, _MAX_BYTES // (two - one + logits))
        """The longest text, the mark before it included."""
        self.example = self.tokenizer.decode(self.tokenizer.encode(EXAMPLE)[: self.max_tokens - 1])

    def about(self) -> dict[str, Any]:
        """Tells the page what it talks to."""
        return {"model": self.name, "max_tokens": self.max_tokens, "text": self.example}

    def work(self, kind: str, fields: Mapping[str, Any]) -> Work:
        """Checks a request, and returns what computes the answer.

        Args:
            kind: One of ``KINDS``.
            fields: As JSON holds them.

        Raises:
            ConfigError: A field that does not exist, is missing or has a wrong value; no edits.
            DataError: A text without a token, or with too many; texts that do not align.
        """
        request = decode({**fields, "type": kind}, KINDS)
        if isinstance(request, Compare):
            ids, others = self._ids(request.text), self._ids(request.other)
            self._require_aligned(ids, others)
            return partial(self._paired, ids, others)
        edits = decode_edits(list(request.edits))
        intervention = Intervention(self.model, edits) if edits else None
        if isinstance(request, TraceText):
            return partial(self._traced, self._ids(request.text), intervention)
        sampling = Sampling(temperature=float(request.temperature), seed=request.seed)
        ids = self._ids(request.text, least=0, room=1)
        count = min(request.max_new_tokens, self.max_tokens - len(ids))
        return partial(self._generated, ids, intervention, sampling, count)

    def _ids(self, text: str, *, least: int = 1, room: int = 0) -> list[int]:
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text).tolist()]
        if not least < len(ids) <= self.max_tokens - room:
            raise DataError(
                got=f"a text of {len(ids) - 1} tokens",
                expected=f"{least} to {self.max_tokens - room - 1}, what this model and its page can hold",
                do="type something" if len(ids) == 1 else "shorten the text",
            )
        return ids

    def _require_aligned(self, ids: Sequence[int], others: Sequence[int]) -> None:
        if len(ids) == len(others) and ids != others:
            return
        if ids == others:
            raise DataError(
                got="the same text twice", expected="two texts that differ", do="change one of them"
            )
        pairs = zip(ids, others, strict=False)
        place = next(
            (place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others))
        )
        here, there = (" ".join(self.tokenizer.tokens(part[place : place + 4])) for part in (ids, others))
        raise DataError(
            got=f"texts of {len(ids) - 1} and {len(others) - 1} tokens, which part at token {place}: "
            f"{here or 'the end'!r} and {there or 'the end'!r}",
            expected="as many tokens in both, so that each token has its partner",
            do="replace words by words of as many tokens, or add words to the shorter text",
        )

    def first_page(self) -> str:
        """Computes the page with the routing of the example.

        Raises:
            AttentionResidualsError: The model cannot be traced.
        """
        (done,) = self.work("trace", {"text": self.example})(_never)
        return html(done["payload"], live=True)

    def _traced(self, ids: list[int], intervention: Intervention | None, check: Check) -> Iterator[Event]:
        if intervention is None:
            yield {"type": "done", "payload": self._payload(self._recorded(ids, check))}
            return
        edited = self._recorded(ids, check, intervention.tap())
        receipts = intervention.receipts()
        clean = self._recorded(ids, check, intervention.control_tap())
        yield self._compared(replace(clean, name="as it is"), replace(edited, name="with edits"), receipts)

    def _paired(self, ids: list[int], others: list[int], check: Check) -> Iterator[Event]:
        first, second = (self._recorded(row, check) for row in (ids, others))
        yield self._compared(replace(first, name="text"), replace(second, name="other text"))

    def _generated(
        self, ids: list[int], intervention: Intervention | None, sampling: Sampling, count: int, check: Check
    ) -> Iterator[Event]:
        def tap() -> Tap:
            return Chain(*([] if intervention is None else [intervention.tap()]), _Stop(check))

        shown, ended = list(ids), ""
        for piece in self.engine.stream(ids, max_new_tokens=count, sampling=sampling, tap=tap):
            check()
            probability, ended = math.exp(piece.log_probability), piece.ended or ""
            shown += [] if ended == "end of text" else [piece.token]
            yield {"type": "token", "text": piece.text, "probability": probability}
        receipts = () if intervention is None else intervention.receipts()
        taps = [] if intervention is None else [intervention.tap()]
        # One more pass for all that is shown: the newest token has not run yet.
        yield {
            "type": "done",
            "payload": self._payload(self._recorded(shown, check, *taps), receipts=receipts),
            "ended": ended,
        }

    @torch.no_grad()
    def _recorded(self, ids: Sequence[int], check: Check, *taps: Tap) -> Recorded:
        recorder = Recorder()
        logits = self.model(self._batch(ids), tap=Chain(*taps, recorder, _Stop(check)))
        trace = recorder.trace(self.model, tokenizer=self.tokenizer)
        return Recorded(
            trace=replace(trace, about={**trace.about, "checkpoint": self.checkpoint}), logits=logits
        )

    def _batch(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=next(self.model.parameters()).device)

    def _payload(
        self, first: Recorded, second: Recorded | None = None, receipts: Sequence[Receipt] = ()
    ) -> Event:
        content = PageContent(
            first=replace(first, lens=self._lens(first)),
            second=second,
            receipts=receipts,
            spell=self.tokenizer.tokens,
            title=f"Depth routing of {self.name}",
        )
        return payload(content)

    def _lens(self, seen: Recorded) -> LensReading | None:
        """Looks at what each site would predict, where that takes about a second at most."""
        tokens = seen.trace.tokens
        if len(seen.trace) * tokens.numel() * self.model.config.vocab_size * seen.trace.width > _LENS_WORK:
            return None
        return lens(self.model, tokens.to(next(self.model.parameters()).device), num_top=_NUM_TOP)

    def _compared(self, first: Recorded, second: Recorded, receipts: Sequence[Receipt] = ()) -> Event:
        """Puts two passes side by side: what each predicts after every token, and how far apart that is."""
        assert first.logits is not None
        assert second.logits is not None
        return {
            "type": "done",
            "payload": self._payload(first, second, receipts),
            "kl": divergence(first.logits, second.logits).values[0].tolist(),
            "before": self._likeliest(first.logits),
            "after": self._likeliest(second.logits),
        }

    def _likeliest(self, logits: Tensor) -> list[list[list[Any]]]:
        """Lists the likeliest next tokens after each token, with their probabilities."""
        top = logits[0].float().softmax(-1).topk(min(_NUM_TOP, logits.shape[-1]))
        rows = zip(map(self.tokenizer.tokens, top.indices.tolist()), top.values.tolist(), strict=True)
        return [[[name, share] for name, share in zip(names, shares, strict=True)] for names, shares in rows]


def _never() -> None:
    """Wants the result, whatever happens."""


class _Stop(Onlooker):
    """A tap that ends a pass at its next event when the result is not wanted any more."""

    def __init__(self, check: Check) -> None:
        self.check = check

    def read(self, read: Read) -> Read:
        """Lets it pass, or ends the pass."""
        self.check()
        return read

    def write(self, write: Write) -> Write:
        """Lets it pass, or ends the pass."""
        self.check()
        return write

"""Traces of generation: every pass of it recorded, and joined to one trace of the whole text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attention_residuals.errors import TapError
from attention_residuals.inference import Engine, Piece, Sampling
from attention_residuals.layers.tap import Tap
from attention_residuals.trace.recorder import Recorder
from attention_residuals.trace.site import SiteTrace
from attention_residuals.trace.trace import Trace

__all__ = ["joined", "record_generation"]


def record_generation(
    engine: Engine,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: Sequence[str] = (),
) -> tuple[list[Piece], Trace]:
    """Generates, and records what every site read for every token that ran.

    The last token that is generated does not run, so the trace ends before it.

    Args:
        engine: Generates.
        prompt: A text, or ids that run as they are.
        max_new_tokens: 1 or more.
        sampling: How tokens are chosen.
        stop: Generation ends before the first of these strings.

    Returns:
        The generated tokens, and the trace of prompt and generated tokens; it is that of one pass over the
        same text.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> engine = Engine(Decoder(presets.scaled(2, vocab_size=300)))
        >>> pieces, trace = record_generation(engine, [5, 6], max_new_tokens=3)
        >>> trace.tokens.shape[1] == 2 + len(pieces) - 1
        True
    """
    recorders: list[Recorder] = []

    def tap() -> Tap:
        recorders.append(Recorder())
        return recorders[-1]

    pieces = list(engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, tap=tap))
    return pieces, joined(
        [recorder.trace(engine.model, tokenizer=engine.tokenizer) for recorder in recorders]
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """Puts traces of the same sequences behind each other: chunks of a prompt, then token after token.

    Positions must go on from trace to trace. Whether the texts before were the same ones, a trace does not
    tell.

    Raises:
        TapError: No traces, or traces of different models, sequences or reads, of padded ones, or of tokens
            that do not follow on one another.
    """
    if not traces:
        raise TapError(got="no traces", expected="one or more", do="record at least one pass")
    first = traces[0]
    for trace in traces:
        same = [site.name for site in trace.sites] == [site.name for site in first.sites]
        if (
            not same
            or len(trace.tokens) != len(first.tokens)
            or (trace.rule, trace.width) != (first.rule, first.width)
            or trace.mask is not None
        ):
            raise TapError(
                got=f"a trace of {len(trace.sites)} sites and {len(trace.tokens)} sequences, "
                f"{'padded' if trace.mask is not None else 'not padded'}",
                expected=f"{len(first.sites)} sites and {len(first.tokens)} sequences without padding, of one model",
                do="join traces of passes that go on with one another",
            )
    for earlier, later in pairwise(traces):
        if not torch.equal(later.positions[:, 0], earlier.positions[:, -1] + 1):
            raise TapError(
                got=f"a trace from positions {later.positions[:, 0].tolist()} on, "
                f"behind one to {earlier.positions[:, -1].tolist()}",
                expected="positions that go on",
                do="join the passes of one cache, in the order in which they ran",
            )
    texts = [trace.token_texts for trace in traces]
    return replace(
        first,
        sites=tuple(
            _joined_sites([trace.sites[number] for trace in traces]) for number in range(len(first.sites))
        ),
        tokens=torch.cat([trace.tokens for trace in traces], dim=1),
        positions=torch.cat([trace.positions for trace in traces], dim=1),
        special=_joined([trace.special for trace in traces], 1),
        writer_norms=torch.cat([trace.writer_norms for trace in traces], dim=2),
        writes=_joined([trace.writes for trace in traces], 2),
        experts={
            writer: torch.cat([trace.experts[writer] for trace in traces], dim=1) for writer in first.experts
        },
        token_texts=tuple(sum(rows, ()) for rows in zip(*texts, strict=True)) if all(texts) else (),
    )


def _joined_sites(sites: list[SiteTrace]) -> SiteTrace:
    first = sites[0]
    parts = {name: [site.tensors().get(name) for site in sites] for name in first.tensors()}
    # The axis of tokens; it is 2 in all others, S B T, S B T H and S B T D.
    axes = {"membership": 3, "state_norms": 1}
    joined_parts: dict[str, Any] = {
        name: _joined(tensors, axes.get(name, 2))
        for name, tensors in parts.items()
        if name != "membership" or first.membership.ndim == 4
    }
    # Sources are the same where they are at every token.
    firsts = list(zip(*(site.same_as for site in sites), strict=True))
    same_as = tuple(firsts.index(own) for own in firsts)
    return replace(first, same_as=same_as, **joined_parts)


def _joined(tensors: Sequence[Tensor | None], axis: int) -> Tensor | None:
    """Puts tensors behind each other; None where one of them is missing."""
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there, dim=axis) if len(there) == len(tensors) else None

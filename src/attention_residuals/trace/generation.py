"""Traces of generation: every pass of it recorded, and joined to one trace of the whole text."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from attention_residuals.errors import TapError
from attention_residuals.inference import Engine, Piece, Sampling
from attention_residuals.layers.tap import Tap
from attention_residuals.trace.recorder import Recorder
from attention_residuals.trace.trace import SiteTrace, Trace

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

    Raises:
        TapError: No traces, or traces of different models, sequences or reads, or of padded ones.
    """
    if not traces:
        raise TapError(got="no traces", expected="one or more", do="record at least one pass")
    first = traces[0]
    for trace in traces:
        same = [site.name for site in trace.sites] == [site.name for site in first.sites]
        if (
            not same
            or len(trace.tokens) != len(first.tokens)
            or trace.rule != first.rule
            or trace.mask is not None
        ):
            raise TapError(
                got=f"a trace of {len(trace.sites)} sites and {len(trace.tokens)} sequences, "
                f"{'padded' if trace.mask is not None else 'not padded'}",
                expected=f"{len(first.sites)} sites and {len(first.tokens)} sequences without padding, of one model",
                do="join traces of passes that go on with one another",
            )
    texts = [trace.token_texts for trace in traces]
    return replace(
        first,
        sites=tuple(
            _joined_sites([trace.sites[number] for trace in traces]) for number in range(len(first.sites))
        ),
        tokens=torch.cat([trace.tokens for trace in traces], dim=1),
        positions=torch.cat([trace.positions for trace in traces], dim=1),
        token_texts=tuple(sum(rows, ()) for rows in zip(*texts, strict=True)) if all(texts) else (),
    )


def _joined_sites(sites: list[SiteTrace]) -> SiteTrace:
    first = sites[0]
    logits = [site.logits for site in sites if site.logits is not None]
    per_token = first.membership.ndim == 4
    return replace(
        first,
        weights=torch.cat([site.weights for site in sites], dim=2),
        logits=torch.cat(logits, dim=2) if logits else None,
        source_norms=torch.cat([site.source_norms for site in sites], dim=2),
        membership=torch.cat([site.membership for site in sites], dim=3) if per_token else first.membership,
    )

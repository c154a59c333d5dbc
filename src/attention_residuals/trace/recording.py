"""Recording a model on tokens or texts, unless the trace would be too large."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.layers.residual import ResidualRule, rehearse
from attention_residuals.layers.tap import Pass
from attention_residuals.models import LanguageModel
from attention_residuals.trace.recorder import Keep, Recorder
from attention_residuals.trace.texts import batch_of, require_unpadded
from attention_residuals.trace.trace import Trace

__all__ = ["record", "trace_bytes"]


def record(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"] | Sequence[str],
    *,
    mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T T"] | None = None,
    tokenizer: Tokenizer | None = None,
    keep: Keep = "routing",
    max_bytes: int = 2**30,
) -> Trace:
    """Runs a model once, without gradients, and returns the trace.

    Args:
        model: Any decoder.
        tokens: What it reads: ids, or texts, which are encoded after an end of text, as documents begin in
            training, and padded on the right.
        mask: As for the model; a mask of real tokens is kept in the trace, and averages leave the rest out.
            Padded ids need one: without a tokenizer, nothing else tells padding from text. Texts bring their own.
        tokenizer: Encodes texts, turns tokens into texts, and knows special ones, which averages leave out.
        keep: ``"values"`` keeps all vectors, too; see ``Recorder``.
        max_bytes: The largest trace to make.

    Raises:
        ConfigError: The trace would be too large, texts came without a tokenizer or with a mask, or rows look
            padded and came without one.
        NonFiniteError: NaN or infinity at a real token.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> trace["output"].weights[:, 0, 0]
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """
    if not isinstance(tokens, Tensor):
        tokens, mask = batch_of(tokens, tokenizer, mask, next(model.parameters()).device)
    elif mask is None and tokenizer is not None:
        require_unpadded(tokens, tokenizer)
    needed = trace_bytes(model, tokens.numel(), keep)
    if needed > max_bytes:
        raise ConfigError(
            got=f"{tokens.numel():,} tokens, of which a trace takes {needed / 2**20:,.0f} MiB",
            expected=f"at most {max_bytes / 2**20:,.0f} MiB (max_bytes)",
            do="stream them through a Summary, model(tokens, tap=Summary()), whose size does not grow; record "
            "fewer tokens; or allow more bytes",
        )
    recorder = Recorder(keep)
    with _recording(recorder, model.residual):
        model(tokens, mask=mask, tap=recorder)
    return recorder.trace(model, tokenizer=tokenizer)


def trace_bytes(model: LanguageModel, num_tokens: int, keep: Keep = "routing") -> int:
    """Tells how much memory a trace takes, masks apart, without running the model.

    The model's residual rule runs alone, on one token and on two.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> trace_bytes(model, 3) == record(model, torch.tensor([[5, 6, 7]])).num_bytes
        True
    """
    one, two = (_rule_trace(model, count, keep).num_bytes for count in (1, 2))
    experts = sum(router.num_active for router in model.routers.values())
    return one + (num_tokens - 1) * (two - one) + num_tokens * experts * torch.int16.itemsize


def _rule_trace(model: LanguageModel, num_tokens: int, keep: Keep) -> Trace:
    rule, recorder = model.residual, Recorder(keep)
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    recorder.begin(Pass(tokens, tokens, None))
    with _recording(recorder, rule):
        rehearse(rule, next(model.parameters()).new_ones(1, num_tokens, rule.width), recorder)
    return recorder.trace(model)


@contextmanager
def _recording(recorder: Recorder, rule: ResidualRule[Any]) -> Iterator[None]:
    """Turns gradients off, and tells of numbers that are not finite where they came up."""
    try:
        with torch.no_grad():
            yield
    except NonFiniteError as error:
        error.add_note(f"the next read would have been at {recorder.next_read(rule)}")
        raise

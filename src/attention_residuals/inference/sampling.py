"""How the next token is chosen from the logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, DataError, NonFiniteError, ShapeError, is_count, is_finite

__all__ = ["Choice", "Sampling", "choose", "filtered_probabilities"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which tokens may be chosen, and how likely each is; the filters act in the order of the fields.

    Args:
        repetition_penalty: Above 1, tokens that have occurred get less likely (arXiv:1909.05858): their
            positive logits are divided by it, their negative ones multiplied. > 0; 1 changes nothing.
        temperature: Divides the logits, >= 0; 0 takes the most likely token.
        top_k: Only so many of the most likely tokens, >= 1; of equal ones, the lower ids. None: all.
        top_p: Only the fewest most likely tokens that have this much probability together, above 0 to 1.
        min_p: Only tokens at least so likely as this share of the most likely one, 0 to 1.
        seed: 0 to 2**63 - 1. The random number of a token depends on it, the sequence's number and the step alone.

    Raises:
        ConfigError: A value out of range.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95).temperature
        0.8
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):  # numbers of numpy become Python's
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        penalty, temperature = self.repetition_penalty, self.temperature
        ranges = {
            "repetition_penalty": (is_finite(penalty) and penalty > 0, "a number above 0", "1.1 is mild"),
            "temperature": (
                is_finite(temperature) and temperature >= 0,
                "a number, 0 or more",
                "0 is greedy, 1 changes nothing",
            ),
            "top_k": (self.top_k is None or is_count(self.top_k), "1 or more, or None", "50 is usual"),
            "top_p": (
                is_finite(self.top_p) and 0 < self.top_p <= 1,
                "a number above 0, at most 1",
                "0.95 is usual, 1 takes all tokens",
            ),
            "min_p": (
                is_finite(self.min_p) and 0 <= self.min_p <= 1,
                "a number from 0 to 1",
                "0.05 is usual, 0 takes all tokens",
            ),
            "seed": (
                isinstance(self.seed, int) and 0 <= self.seed < 2**63,
                "a whole number from 0 to 2**63 - 1",
                "pass another number for another text",
            ),
        }
        for name, (holds, expected, do) in ranges.items():
            if not holds:
                raise ConfigError(got=f"{name}={getattr(self, name)!r}", expected=expected, do=do)


class Choice(NamedTuple):
    """The chosen tokens, and the log-probability of each before any filter, in nats."""

    tokens: Int[Tensor, " B"]
    log_probabilities: Float[Tensor, " B"]


def choose(
    logits: Float[Tensor, "B V"],
    sampling: Sampling,
    *,
    seen: Sequence[Int[Tensor, "_"]],
    sequences: Sequence[int],
    steps: Sequence[int],
) -> Choice:
    """Chooses a token for each sequence.

    Computed in float64, a row by itself, so that the other rows of a batch change nothing.

    Args:
        logits: Of the next token.
        sampling: How to choose.
        seen: The ids of each sequence so far, prompt included.
        sequences: The number of each sequence in its request.
        steps: How many tokens each sequence has got before this one.

    Raises:
        NonFiniteError: A sequence whose logits hold NaN, or whose largest is infinite. Tokens whose logit is
            -inf are never chosen.
        DataError: An id of ``seen`` that has no logit.
        ShapeError: Not as many rows, ``seen``, ``sequences`` and ``steps``.

    Example:
        >>> found = choose(torch.tensor([[0.0, 2.0, 1.0]]), Sampling(temperature=0.0), seen=[torch.tensor([1])],
        ...                sequences=[0], steps=[0])
        >>> found.tokens
        tensor([1])
    """
    counts = [len(logits), len(seen), len(sequences), len(steps)]
    if len(set(counts)) > 1:
        raise ShapeError(
            got=f"{counts[0]} rows of logits, {counts[1]} seen, {counts[2]} sequences, {counts[3]} steps",
            expected="one of each for every sequence",
            do="pass seen=[torch.tensor([], dtype=torch.long)] * B where nothing has been seen",
        )
    exact, tokens = logits.detach().double().cpu(), []
    for row, ids, sequence, step in zip(exact, seen, sequences, steps, strict=True):
        penalised = _penalised(row, ids.cpu(), sampling.repetition_penalty)
        if not penalised.max().isfinite():  # the maximum with NaN is NaN
            raise NonFiniteError(
                got=f"{float(penalised.max())} as the largest logit of sequence {sequence} at step {step}",
                expected="a largest logit that is finite",
                do="look at the model: a checkpoint of a run that diverged gives such logits",
            )
        # By id, not by rank: logits that differ by rounding swap ranks, but hardly move these bounds.
        upper = filtered_probabilities(penalised, sampling).cumsum(0)
        draw = _uniform(sampling.seed, sequence, step) * upper[-1]
        tokens.append(int(torch.searchsorted(upper, draw, right=True)))
    chosen = torch.tensor(tokens)
    log_probabilities = exact.log_softmax(1).gather(1, chosen[:, None])[:, 0]
    return Choice(chosen, log_probabilities)


def filtered_probabilities(logits: Float[Tensor, " V"], sampling: Sampling) -> Float[Tensor, " V"]:
    """Returns what is drawn from: probabilities after temperature, top-k, top-p and min-p; they sum to 1.

    Example:
        >>> filtered_probabilities(torch.tensor([0.0, 0.0, -9.0]), Sampling(top_k=2))
        tensor([0.5000, 0.5000, 0.0000])
    """
    if sampling.temperature == 0:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1)
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.where(_largest(logits, sampling.top_k), -math.inf)
    # The largest becomes 0 first, so that no temperature makes it infinite.
    probabilities = ((logits - logits.max()) / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    probabilities = probabilities * (probabilities >= sampling.min_p * probabilities.max())
    return probabilities / probabilities.sum()


def _largest(logits: Tensor, count: int) -> Tensor:
    """Marks so many of the largest; of equal ones, the lower ids."""
    least = logits.topk(count).values[-1]
    marked = logits > least
    equal = (logits == least).nonzero()[:, 0]
    return marked.index_fill(0, equal[: count - int(marked.sum())], True)


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Keeps the fewest of the largest that have this share together; of equal ones, the lower ids."""
    candidates = probabilities.nonzero()[:, 0]  # after top-k, a sort of few
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    count = 1 + int((ordered.cumsum(0)[:-1] < share).sum())
    return torch.zeros_like(probabilities).index_copy(0, candidates[order[:count]], ordered[:count])


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    if penalty == 1:
        return logits
    ids = seen.unique()
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < len(logits):
        raise DataError(
            got=f"seen ids from {int(ids[0])} to {int(ids[-1])}",
            expected=f"0 to {len(logits) - 1}, one for each logit",
            do="leave padding out, and encode with the tokenizer that the model was trained with",
        )
    old, largest = logits[ids], torch.finfo(logits.dtype).max
    # A penalty near 0 would make a finite logit infinite; one that is infinite already stays so.
    new = torch.where(old > 0, old / penalty, old * penalty).clamp(-largest, largest)
    return logits.index_put((ids,), torch.where(old.isfinite(), new, old))


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def _uniform(seed: int, sequence: int, step: int) -> float:
    """Returns a number from 0 to below 1 that depends on its arguments alone."""
    # The raw bits, which numpy promises to keep across versions.
    bits = np.random.Philox(key=[seed, sequence], counter=[0, 0, 0, step]).random_raw()
    return float((bits >> 11) * 2.0**-53)

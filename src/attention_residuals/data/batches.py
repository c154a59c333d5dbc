"""The order of the data: a pure function of the seed and the step, so that nothing about it needs saving."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, DataError

__all__ = ["UNSCORED", "Batch", "Batches", "sequential"]


UNSCORED = -100
"""The target of a token whose prediction does not count, as in torch's cross-entropy."""


class Batch(NamedTuple):
    """Tokens, the token that follows each, and the number of the document that each belongs to.

    The target is ``UNSCORED`` where the token that follows does not count; ``num_scored`` are the others.

    Documents are numbered inside a sequence: equal numbers, same document. A document starts with the token that ends
    the text before it.

    Example:
        >>> batch = next(sequential(np.array([0, 5, 6, 0, 7]), sequence_length=4, batch_size=1))
        >>> batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.documents_BT.tolist()
        ([[0, 5, 6, 0]], [[5, 6, 0, 7]], [[1, 1, 1, 2]])
    """

    tokens_BT: Int64[Tensor, "B T"]
    targets_BT: Int64[Tensor, "B T"]
    documents_BT: Int64[Tensor, "B T"]

    @property
    def num_scored(self) -> int:
        """How many targets count."""
        return int((self.targets_BT != UNSCORED).sum())

    @property
    def scored_ids(self) -> npt.NDArray[np.int64]:
        """The targets that count, in a row."""
        found: npt.NDArray[np.int64] = self.targets_BT[self.targets_BT != UNSCORED].cpu().numpy()
        return found

    def split(self, num_sequences: int) -> list["Batch"]:
        """Cuts it into parts of so many sequences; the last may have fewer."""
        return [Batch(*part) for part in zip(*(whole.split(num_sequences) for whole in self), strict=True)]

    def rows(self, chosen: slice) -> "Batch":
        """Takes some of its sequences."""
        return Batch(*(whole[chosen] for whole in self))


class Batches:
    """Batches for training, where ``at(step)`` depends on the seed and the step and on nothing else.

    The tokens are cut into windows whose targets do not overlap. Each epoch visits every window exactly
    once, in an order of its own; a batch may straddle epochs. Windows are numbered through the whole run, so
    their order does not depend on the batch size. The last tokens, fewer than a window, are not trained on.

    Args:
        tokens: All tokens in a row, such as ``corpus.train``.
        sequence_length: Tokens per sequence, >= 1.
        batch_size: Sequences per step, >= 1. To spread a step over micro-batches or processes, split the
            batch that ``at`` returns: the order then stays the same for every such split.
        seed: >= 0.
        device: Where the batches go; default the CPU.
        end_of_text: The token that starts a document: ``corpus.tokenizer.end_of_text``, 0 in ours.
        scored: For each token whether predicting it counts, such as ``corpus.train_scored``; None counts all.
        shuffled_within: No window is visited as many places or more before or after its own, >= 0: for texts
            that are in an order to learn in. None shuffles all of them.

    Raises:
        ConfigError: A number is out of range.
        DataError: There are too few tokens for one sequence, or another number of them is scored.

    Example:
        >>> batches = Batches(np.arange(100), sequence_length=9, batch_size=4, seed=0)
        >>> batches.num_windows
        11
        >>> bool((batches.at(step=3).targets_BT == batches.at(step=3).tokens_BT + 1).all())
        True
    """

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        device: torch.device | str | None = None,
        end_of_text: int = Tokenizer.end_of_text,
        scored: npt.NDArray[np.bool_] | None = None,
        shuffled_within: int | None = None,
    ) -> None:
        _check_at_least(1, sequence_length=sequence_length, batch_size=batch_size)
        _check_at_least(0, seed=seed, shuffled_within=shuffled_within or 0)
        _check_tokens(tokens, sequence_length + 1, scored)
        self.scored, self.shuffled_within = scored, shuffled_within
        self.tokens, self.sequence_length, self.batch_size = tokens, sequence_length, batch_size
        self.seed, self.device, self.end_of_text = seed, device, end_of_text
        self.num_windows = (len(tokens) - 1) // sequence_length
        self._epoch, self._windows = -1, np.empty(0, dtype=np.int64)

    def at(self, step: int) -> Batch:
        """Gives the batch of a step.

        Args:
            step: >= 0; steps may be asked for in any order.

        Returns:
            ``batch_size`` sequences.

        Raises:
            ConfigError: The step is negative.
        """
        _check_at_least(0, step=step)
        examples = range(step * self.batch_size, (step + 1) * self.batch_size)
        starts = [
            self._window(*divmod(example, self.num_windows)) * self.sequence_length for example in examples
        ]
        return _batch(self.tokens, starts, self.sequence_length, self.device, self.end_of_text, self.scored)

    def _window(self, epoch: int, place: int) -> int:
        """The window that this epoch visits at this place; only the current epoch's order is kept."""
        if epoch != self._epoch:
            # Sorting raw bits, because numpy promises that these never change; of its shuffles it does not.
            bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            keys: npt.NDArray[Any] = bits.random_raw(self.num_windows)
            if self.shuffled_within is not None:
                keys = np.arange(self.num_windows) + self.shuffled_within * (keys / 2**64)
            self._epoch, self._windows = epoch, np.argsort(keys, kind="stable")
        return int(self._windows[place])


def sequential(
    tokens: npt.NDArray[Any],
    *,
    sequence_length: int,
    batch_size: int,
    device: torch.device | str | None = None,
    end_of_text: int = Tokenizer.end_of_text,
    scored: npt.NDArray[np.bool_] | None = None,
) -> Iterator[Batch]:
    """Gives batches for evaluation: in order, every token after the first predicted exactly once.

    The last batches may be smaller: fewer sequences, and at the very end one sequence of what is left.

    Args:
        tokens: All tokens in a row, such as ``corpus.valid``.
        sequence_length: Tokens per sequence, >= 1.
        batch_size: Sequences per batch, >= 1.
        device: Where the batches go; default the CPU.
        end_of_text: The token that starts a document: ``corpus.tokenizer.end_of_text``, 0 in ours.
        scored: As in ``Batches``.

    Returns:
        An iterator over the batches.

    Raises:
        ConfigError: A number is out of range.
        DataError: There are fewer than two tokens, or another number of them is scored.

    Example:
        >>> [batch.targets_BT.tolist() for batch in sequential(np.arange(6), sequence_length=2, batch_size=2)]
        [[[1, 2], [3, 4]], [[5]]]
    """
    _check_at_least(1, sequence_length=sequence_length, batch_size=batch_size)
    _check_tokens(tokens, 2, scored)
    return _in_order(tokens, sequence_length, batch_size, device, end_of_text, scored)


def _in_order(
    tokens: npt.NDArray[Any],
    sequence_length: int,
    batch_size: int,
    device: torch.device | str | None,
    end_of_text: int,
    scored: npt.NDArray[np.bool_] | None,
) -> Iterator[Batch]:
    num_windows, left_over = divmod(len(tokens) - 1, sequence_length)
    for first in range(0, num_windows, batch_size):
        starts = [n * sequence_length for n in range(first, min(first + batch_size, num_windows))]
        yield _batch(tokens, starts, sequence_length, device, end_of_text, scored)
    if left_over:
        yield _batch(tokens, [num_windows * sequence_length], left_over, device, end_of_text, scored)


def _batch(
    tokens: npt.NDArray[Any],
    starts: Sequence[int],
    length: int,
    device: torch.device | str | None,
    end_of_text: int,
    scored: npt.NDArray[np.bool_] | None,
) -> Batch:
    windows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    targets = windows[:, 1:]
    if scored is not None:
        counts = np.stack([scored[start + 1 : start + length + 1] for start in starts])
        targets = np.where(counts, targets, UNSCORED)
    token_BT = torch.from_numpy(windows[:, :-1].copy()).to(device)
    targets_BT = torch.from_numpy(np.ascontiguousarray(targets)).to(device)
    documents_BT = (token_BT == end_of_text).cumsum(dim=1)
    return Batch(token_BT, targets_BT, documents_BT)


def _check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ConfigError(
                got=f"{name}={number}", expected=f"{name} >= {least}", do=f"pass a larger {name}"
            )


def _check_tokens(tokens: npt.NDArray[Any], least: int, scored: npt.NDArray[np.bool_] | None) -> None:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            got=f"tokens of shape {tokens.shape} and type {tokens.dtype}",
            expected="a single row of integers",
            do="pass corpus.train or corpus.valid",
        )
    if len(tokens) < least:
        raise DataError(
            got=f"{len(tokens)} tokens",
            expected=f"at least {least}: one sequence and the token after it",
            do="prepare a larger corpus or pass a smaller sequence_length",
        )
    if scored is not None and len(scored) != len(tokens):
        raise DataError(
            got=f"{len(tokens)} tokens, and {len(scored)} that say whether they are scored",
            expected="one for each token",
            do="pass corpus.train with corpus.train_scored, or corpus.valid with corpus.valid_scored",
        )

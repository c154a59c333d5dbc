"""The loss of a model on a row of tokens, in nats per token and bits per byte."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.data import Batch, Tokenizer, bits_per_byte, sequential
from attention_residuals.data.batches import UNSCORED
from attention_residuals.models import LanguageModel
from attention_residuals.train.config import Precision

__all__ = ["Evaluation", "document_mask", "evaluate", "measure", "summed_nats", "total_nats"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts some text.

    Args:
        loss: Mean cross-entropy, nats per token.
        bits_per_byte: The same per byte of text: comparable across tokenizers; 8 is no knowledge at all.
        num_tokens: Targets that were predicted, each counted once.
        num_bytes: What they stand for.
    """

    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: npt.NDArray[np.integer[Any]],
    *,
    bytes_per_token: npt.NDArray[np.int64],
    sequence_length: int,
    batch_size: int,
    max_batches: int | None = None,
    precision: Precision = "float32",
    cross_documents: bool = False,
    end_of_text: int = Tokenizer.end_of_text,
    scored: npt.NDArray[np.bool_] | None = None,
) -> Evaluation:
    """Predicts every token but the first, once each, in windows that know nothing of one another.

    Args:
        model: Any decoder.
        tokens: All tokens in a row, such as ``corpus.valid``.
        bytes_per_token: Of the tokenizer, one number per id.
        sequence_length: Tokens per window; the first target of a window is predicted from one token.
        batch_size: Windows at once.
        max_batches: Stop after so many; None goes to the end.
        precision: As in ``TrainConfig``.
        cross_documents: As in ``TrainConfig``.
        end_of_text: The id that ends a document; of this library's own tokenizers by default.
        scored: For each token whether it counts, such as ``corpus.valid_scored``; None counts all.

    Raises:
        DataError: Fewer than two tokens, or targets that stand for no byte.

    Example:
        >>> from attention_residuals.models import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=256))
        >>> one_byte = np.ones(256, dtype=np.int64)
        >>> tokens = np.arange(1, 101)
        >>> found = evaluate(model, tokens, bytes_per_token=one_byte, sequence_length=16, batch_size=4)
        >>> found.num_tokens, round(found.bits_per_byte, 1)
        (99, 8.0)
    """

    def nats(batch: Batch) -> float:
        return total_nats(model, batch, precision=precision, cross_documents=cross_documents).item()

    return measure(
        nats,
        tokens,
        bytes_per_token=bytes_per_token,
        sequence_length=sequence_length,
        batch_size=batch_size,
        max_batches=max_batches,
        device=next(model.parameters()).device,
        end_of_text=end_of_text,
        scored=scored,
    )


def measure(
    nats_of: Callable[[Batch], float],
    tokens: npt.NDArray[np.integer[Any]],
    *,
    bytes_per_token: npt.NDArray[np.int64],
    sequence_length: int,
    batch_size: int,
    max_batches: int | None,
    device: torch.device | str | None,
    end_of_text: int,
    scored: npt.NDArray[np.bool_] | None,
) -> Evaluation:
    """Does what ``evaluate`` does, with whatever computes the summed nats of a batch.

    Args:
        nats_of: Returns the summed cross-entropy of a batch's targets that are scored.
        tokens: As for ``evaluate``.
        bytes_per_token: As for ``evaluate``.
        sequence_length: As for ``evaluate``.
        batch_size: As for ``evaluate``.
        max_batches: As for ``evaluate``.
        device: Where the batches go.
        end_of_text: As for ``evaluate``.
        scored: As for ``evaluate``.
    """
    windows = sequential(
        tokens,
        sequence_length=sequence_length,
        batch_size=batch_size,
        device=device,
        end_of_text=end_of_text,
        scored=scored,
    )
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for batch in islice(windows, max_batches):
        nats += nats_of(batch)
        num_tokens += batch.num_scored
        num_bytes += int(bytes_per_token[batch.scored_ids].sum())
    return Evaluation(
        loss=nats / max(1, num_tokens),
        bits_per_byte=bits_per_byte(nats, num_bytes),
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )


def total_nats(
    model: Callable[..., Tensor], batch: Batch, *, precision: Precision, cross_documents: bool
) -> Float[Tensor, ""]:
    """Returns the summed cross-entropy of a batch's targets that are scored, in nats and float32."""
    mask = None if cross_documents else document_mask(batch.documents_BT)
    device = batch.tokens_BT.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        logits_BTV = model(batch.tokens_BT, mask=mask)
    return summed_nats(logits_BTV, batch.targets_BT)


def summed_nats(logits_BTV: Float[Tensor, "B T V"], targets_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Returns the summed cross-entropy of the targets that are scored, in nats and float32.

    Example:
        >>> summed_nats(torch.zeros(1, 3, 8), torch.tensor([[0, UNSCORED, 2]]))  # 2 ln 8
        tensor(4.1589)
    """
    logits, targets = logits_BTV.float().flatten(0, 1), targets_BT.flatten()
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=UNSCORED)


def document_mask(documents_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T T"] | None:
    """Allows attention inside each document only; None where every row holds a single one.

    Args:
        documents_BT: Numbers that never fall along a row.

    Example:
        >>> document_mask(torch.tensor([[1, 1, 2]]))[0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    if torch.equal(documents_BT[:, 0], documents_BT[:, -1]):
        return None
    return documents_BT[:, :, None] == documents_BT[:, None, :]

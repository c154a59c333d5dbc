"""Texts as the batch that a model reads, and which of its tokens are special."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError

__all__ = ["batch_of", "require_unpadded", "special_tokens"]


def batch_of(
    texts: Sequence[str], tokenizer: Tokenizer | None, mask: Tensor | None, device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Encodes texts after an end of text each, and pads them on the right.

    Returns:
        Tokens, and the mask of real ones; None where all texts have the same number of tokens.

    Raises:
        ConfigError: One text alone, no texts, no tokenizer, or a mask beside the texts' own.
    """
    if isinstance(texts, str) or not texts or tokenizer is None or mask is not None:
        what = "one text" if isinstance(texts, str) else f"{len(texts)} texts"
        raise ConfigError(
            got=f"{what}, {'no' if tokenizer is None else 'a'} tokenizer, {'no' if mask is None else 'a'} mask",
            expected="a list of texts and a tokenizer, without a mask: padding is known",
            do='call record(model, ["a text"], tokenizer=tokenizer)',
        )
    rows = [torch.tensor([tokenizer.end_of_text, *ids]) for ids in tokenizer.encode_batch(texts)]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.end_of_text)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    return tokens.to(device), None if mask.all() else mask.to(device)


def require_unpadded(tokens: Int[Tensor, "B T"], tokenizer: Tokenizer) -> None:
    """Refuses rows that look padded: one special token twice or more at an end of a row beside others.

    Raises:
        ConfigError: There are such rows.
    """
    if len(tokens) < 2 or tokens.shape[1] < 2:
        return
    special = special_tokens(tokens, tokenizer)
    ends = [(tokens[:, one] == tokens[:, next_]).cpu() & special[:, one] for one, next_ in ((-1, -2), (0, 1))]
    if padded := (ends[0] | ends[1]).nonzero().flatten().tolist():
        raise ConfigError(
            got=f"{len(padded)} of {len(tokens)} rows (the first is row {padded[0]}) that begin or end with one "
            "special token twice, as padded ones do, and no mask",
            expected="a mask of real tokens, without which padding counts as text",
            do="pass mask=..., True for real tokens, or pass texts, which bring their own",
        )


def special_tokens(tokens: Int[Tensor, "B T"], tokenizer: Tokenizer) -> Bool[Tensor, "B T"]:
    """Tells which tokens stand for no text: the end of a text, marks of a chat, unused ids."""
    return torch.from_numpy(tokenizer.bytes_per_token == 0)[tokens.cpu()]

"""Prompts as they are given, texts or ids, turned into ids that the model can run."""

import operator
from collections.abc import Iterable
from typing import Any

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError, DataError

__all__ = ["encoded_prompts"]


def encoded_prompts(
    prompts: Any, tokenizer: Tokenizer | None, *, vocab_size: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """Turns prompts into ids; a text runs behind the token that ends a text, as it does in training.

    Args:
        prompts: Texts, or sequences of ids; whatever else comes is refused.
        tokenizer: For texts.
        vocab_size: V of the model.
        max_tokens: The model's context, in which a prompt must leave room for a token.

    Raises:
        DataError: No list of prompts; a prompt that is neither a text nor ids, that is empty, fills the
            context or holds an id that the model does not have.
        ConfigError: A text without a tokenizer.

    Example:
        >>> encoded_prompts([[5, 6], [7]], None, vocab_size=9, max_tokens=4)
        [(5, 6), (7,)]
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise DataError(
            got=f"{prompts!r:.60} as the list of prompts",
            expected="a list of texts, or of lists of token ids",
            do="pass [prompt] for one prompt",
        )
    given, encoded = list(prompts), []
    for number, prompt in enumerate(given):
        name = f"prompt {number} of {len(given)}"
        ids = _of_text(prompt, tokenizer) if isinstance(prompt, str) else _as_ids(prompt, name)
        if not ids:
            raise DataError(
                got=f"{name}, which is empty",
                expected="at least one token",
                do="leave it out, or begin with the token that ends a text",
            )
        if len(ids) >= max_tokens:
            raise DataError(
                got=f"{name}, of {len(ids)} tokens",
                expected=f"fewer than {max_tokens}, the model's context, so that a token can follow",
                do="cut the prompt, or use a model with a larger max_tokens",
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise DataError(
                got=f"{name}, with token ids from {min(ids)} to {max(ids)}",
                expected=f"0 to {vocab_size - 1}",
                do="encode the text with the tokenizer that the model was trained with",
            )
        encoded.append(ids)
    return encoded


def _of_text(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise ConfigError(
            got="a text as a prompt, and no tokenizer",
            expected="a tokenizer, or prompts of token ids",
            do="make the engine with Engine(model, tokenizer)",
        )
    return (tokenizer.end_of_text, *tokenizer.encode(text).tolist())


def _as_ids(prompt: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError as error:
        raise DataError(
            got=f"{name}: {prompt!r:.60}",
            expected="a text, or a list of token ids, which are whole numbers",
            do="pass a list of prompts such as ['a text'] or [[5, 6, 7]]; for one prompt, the text or the ids",
        ) from error

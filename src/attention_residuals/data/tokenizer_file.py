"""Files of the ``tokenizers`` package: which of them keep every text, and what their ids stand for."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from attention_residuals.data.byte_level import LETTERS, cut
from attention_residuals.errors import ConfigError, DataError, nearest

__all__ = ["TOLD", "Meaning", "Steps", "end_of_text_in", "meaning_of", "read", "steps_of"]

TOLD = "attention_residuals"
"""Key in a file's model, which the ``tokenizers`` package ignores: the end of text and the number of ids."""

ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  DeepSeek's, spelled with wide bars
    "</s>",
    "<eos>",
)
"""Names under which models end a text or a turn."""

_NFC = tokenizers.normalizers.NFC()
_KEEP_ALL = {"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts"}


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What each id stands for.

    Args:
        raw: The bytes of each id; none where no text turns into it.
        names: Of each id without bytes, where it has one.
    """

    raw: tuple[bytes, ...]
    names: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What happens to a text before BPE.

    Args:
        nfc: Unicode is composed: a letter and its accent become one character where there is one.
        prefix_space: A space is put before a text that begins with none.
        plain: GPT-2's rule cuts the text into words, and nothing else happens.
    """

    nfc: bool
    prefix_space: bool
    plain: bool

    def changed(self, text: str) -> str:
        """Gives the text that the tokens stand for."""
        if self.nfc:
            text = str(_NFC.normalize_str(text))
        return " " + text if self.prefix_space and text and not text.startswith(" ") else text

    def pieces(self, text: str) -> Iterable[str]:
        """Cuts a long text where that surely changes no token."""
        return cut(text) if self.plain else (text,)


def read(path: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Reads a tokenizer.json, without its truncation and padding.

    Returns:
        The tokenizer, and what this library noted in its file: ``end_of_text`` and ``vocab_size``, or nothing.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
        told = content["model"].get(TOLD, {})
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        if told != {} and [type(told[key]) for key in ("end_of_text", "vocab_size")] != [str, int]:
            raise TypeError(f"{TOLD}: {told!r}")
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict) and len(set(vocabulary.values())) < len(vocabulary):
            raise ValueError("one id for two tokens")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    try:
        bpe = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # the package raises no class of its own
            raise
        raise _unreadable(path, str(error)) from error
    for name, index in added.items():
        if bpe.token_to_id(name) != index:
            why = f"its ids are not those that it lists: {name!r} is {index} and {bpe.token_to_id(name)}"
            raise _unreadable(path, why)
    bpe.no_truncation()
    bpe.no_padding()
    return bpe, told


def steps_of(description: dict[str, Any], name: str) -> Steps:
    """Checks that a tokenizer is a byte-level BPE from which texts come back, and says what it does first.

    Args:
        description: A tokenizer.json as the ``tokenizers`` package writes it.
        name: What to call it in an error.

    Raises:
        DataError: It is of another kind, or loses text.
    """
    before = _flat(description["pre_tokenizer"], "pretokenizers")
    normalizers = _flat(description["normalizer"], "normalizers")
    added = [token for token in description["added_tokens"] if not token["special"]]
    prefix_space = any(step.get("add_prefix_space") for step in before)
    obstacle = _other_kind(description["model"], before)
    if obstacle is None:
        obstacle = _loss(normalizers, before, added)
    if obstacle is not None:
        raise DataError(
            got=f"{name}: {obstacle}",
            expected="a byte-level BPE (pre-tokenizer ByteLevel) that keeps all text, "
            "such as those of GPT-2, SmolLM2, Llama 3 and Qwen",
            do="choose a model with such a tokenizer, or train one with Tokenizer.train",
        )
    words = len(before) == 1 and before[0]["use_regex"]
    plain = words and not prefix_space and not added and not normalizers
    return Steps(nfc=bool(normalizers), prefix_space=prefix_space, plain=plain)


def meaning_of(
    bpe: tokenizers.Tokenizer, description: dict[str, Any], name: str, size: int | None
) -> Meaning:
    """Finds what the ids of a byte-level BPE stand for.

    What no text turns into has no bytes: special tokens, and what no merge makes. The exception is a special
    token that BPE makes of the same letters in a text: such an id is text.

    Args:
        bpe: The tokenizer, which takes special tokens in a text for text.
        description: The same as ``steps_of`` takes it.
        name: What to call it in an error.
        size: Number of ids; None for one more than the largest.

    Raises:
        DataError: An id has two meanings, as a token that was added and as a piece.
        ConfigError: There are more ids than size.
    """
    model = description["model"]
    vocabulary: dict[str, int] = model["vocab"]
    added = description["added_tokens"]
    ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    total = max(ids.values(), default=-1) + 1
    if size is not None and size < total:
        raise ConfigError(
            got=f"vocab_size={size} for {name}",
            expected=f"vocab_size >= {total}, the number of its ids",
            do="pass the number of rows of the model's embedding, or leave it out",
        )
    raw, names = [b""] * (size or total), {index: token for token, index in ids.items()}
    made = {*LETTERS, *(left + right for left, right in model["merges"])}
    for piece, index in vocabulary.items():
        if LETTERS.keys() >= set(piece) and (piece in made or model["ignore_merges"]):
            raw[index] = bytes(LETTERS[letter] for letter in piece)
    for token in added:
        content, index = token["content"], token["id"]
        if token["special"]:
            alone = bpe.encode(raw[index].decode(errors="replace"), add_special_tokens=False).ids
            raw[index] = raw[index] if content in made or alone == [index] else b""
        elif raw[index] and raw[index] != content.encode():
            raise DataError(
                got=f"{name}: id {index} for the added token {content!r} and for the bytes {raw[index]!r}",
                expected="one meaning for each id",
                do="leave that token out of added_tokens",
            )
        else:
            raw[index] = content.encode()
    return Meaning(raw=tuple(raw), names={index: name for index, name in names.items() if not raw[index]})


def end_of_text_in(meaning: Meaning, wanted: str | None, name: str) -> int:
    """Finds the id that ends a text.

    Args:
        meaning: Of the ids.
        wanted: The token's name; None where there should be no choice.
        name: What to call the tokenizer in an error.

    Raises:
        DataError: None was wanted, and there is none or a choice.
        ConfigError: There is no such token, or a text can turn into it.
    """
    ids = {token: index for index, token in meaning.names.items()}
    found = [token for token in ENDS if token in ids] if wanted is None else [wanted]
    some = ", ".join(map(repr, list(ids)[:8])) + (", ..." if len(ids) > 8 else "")
    if len(found) != 1:
        which = (
            f"several tokens that could end a text: {', '.join(found)}" if found else "no known end of text"
        )
        raise DataError(
            got=f"{name} with {which}",
            expected=f"to be told which of its tokens ends a text: {some or 'it has none that could'}",
            do=f"Tokenizer.load(path, end_of_text={(found or ['...'])[0]!r}); "
            "a model's config calls it eos_token",
        )
    if found[0] not in ids:
        raise ConfigError(
            got=f"end_of_text={found[0]!r}, which is no special token of {name}",
            expected=f"a token that no text turns into: {some or 'it has none'}",
            do=nearest(found[0], ids),
        )
    return ids[found[0]]


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None or step["type"] != "Sequence":
        return [] if step is None else [step]
    return [one for part in step[key] for one in _flat(part, key)]


def _other_kind(model: dict[str, Any], before: list[dict[str, Any]]) -> str | None:
    """Says why this is no byte-level BPE."""
    if model["type"] != "BPE":
        return f"a tokenizer of kind {model['type']}"
    kinds = [step["type"] for step in before]
    if kinds.count("ByteLevel") != 1:
        return f"a BPE tokenizer with pre-tokenizer {' + '.join(kinds) or 'none'}, not ByteLevel"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[key]:
            return f"a BPE tokenizer with {key} {model[key]!r}"
    return None


def _loss(
    normalizers: list[dict[str, Any]], before: list[dict[str, Any]], added: list[dict[str, Any]]
) -> str | None:
    """Says what of a text would not come back."""
    for step in normalizers:
        if step["type"] != "NFC":
            return f"normalizer {step['type']}, which changes texts"
    for place, step in enumerate(before):
        if step["type"] not in _KEEP_ALL:
            return f"pre-tokenizer {step['type']}, which is not known to keep all text"
        # Where what matches is kept and the rest removed, the pattern usually matches all; `encode` checks.
        if step.get("behavior") == "Removed" and not step.get("invert"):
            return f"pre-tokenizer {step['type']} with behavior Removed, which removes text"
        if step.get("add_prefix_space") and (place or added):
            return "ByteLevel with add_prefix_space after other steps, which puts spaces inside texts"
    for token in added:
        if token["lstrip"] or token["rstrip"]:
            return f"the added token {token['content']!r}, which removes the spaces beside it"
    return None


def _unreadable(path: str | Path, why: str) -> DataError:
    return DataError(
        got=f"{path} ({why})",
        expected="a file that Tokenizer.save wrote, or the tokenizer.json of a byte-level BPE",
        do="train a tokenizer with Tokenizer.train, prepare the corpus again, or download the file again",
    )

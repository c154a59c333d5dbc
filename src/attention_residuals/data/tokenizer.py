"""The tokenizer: byte-level byte-pair encoding, so that every text has tokens and comes back unchanged."""

import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import tokenizers

from attention_residuals.data.byte_level import (
    END_OF_TEXT,
    LETTERS,
    cut,
    not_unicode,
    ours,
    portions,
    readable,
    vocabulary,
)
from attention_residuals.data.tokenizer_file import TOLD, end_of_text_in, meaning_of, read, steps_of
from attention_residuals.errors import ConfigError, DataError

__all__ = ["Tokenizer", "bits_per_byte"]


class Tokenizer:
    """A byte-level BPE: one of ours, fully given by its list of merges, or another model's, from ``load``.

    In ours, id 0 ends a text, then come the bytes, then the merges. Another model's tokenizer keeps its own
    ids and its own way to cut a text.

    No text turns into the token that ends a text or into any other special token, not even one that spells
    its name: a text cannot end itself, or forge the turns of a chat. To use special tokens, write their ids.
    (A special token that the merges make as well, such as a padding token "!", counts as text.)

    Decoding what was encoded gives the same text, for every text, with two exceptions that other models
    bring: NFC normalisation (Qwen, GPT-NeoX), and a space before a text that begins with none
    (``add_prefix_space``). Then the text comes back changed so, and bytes are counted in the changed text.

    Args:
        merges: Pairs of pieces that become one, first the most frequent; usually from ``train`` or ``load``.

    Raises:
        DataError: A merge of pieces that do not exist by then.

    Example:
        >>> tokenizer = Tokenizer.train(["low lower lowest"] * 9, vocab_size=260)
        >>> tokenizer.tokens(tokenizer.encode("low lowest"))
        ['low', '␣low', 'e', 's', 't']
        >>> tokenizer.decode(tokenizer.encode("any ☃ at all"))
        'any ☃ at all'
    """

    end_of_text: int = 0
    """The id that ends a text; 0 in every tokenizer of ours."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self.merges = tuple(merges)
        self._adopt(ours(self.merges), "Tokenizer", END_OF_TEXT, None)
        self._told: dict[str, Any] = {}

    def _adopt(
        self, bpe: tokenizers.Tokenizer, name: str, end_of_text: str | None, vocab_size: int | None
    ) -> None:
        bpe.encode_special_tokens = True  # the characters <|endoftext|> in a text are just characters
        description = json.loads(bpe.to_str())
        self._steps = steps_of(description, name)
        meaning = meaning_of(bpe, description, name, vocab_size)
        self.end_of_text = end_of_text_in(meaning, end_of_text, name)
        self._bpe, self._bytes, self._names = bpe, meaning.raw, meaning.names
        self._lengths = np.array([len(raw) for raw in self._bytes], dtype=np.int64)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns merges from texts; the same texts in the same order give the same tokenizer.

        Args:
            texts: What to learn from.
            vocab_size: Number of ids, at least 257 (256 bytes and the end of text). Fewer come out where
                the texts hold fewer pairs that occur twice.

        Returns:
            The tokenizer.

        Raises:
            ConfigError: vocab_size is below 257.
            DataError: A text holds half a surrogate pair.
        """
        if vocab_size < 257:
            raise ConfigError(
                got=f"vocab_size={vocab_size}",
                expected="vocab_size >= 257: every byte has an id, and so has the end of a text",
                do="pass 4096 for a laptop-sized corpus",
            )
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=list(LETTERS),
            show_progress=False,
        )
        try:
            bpe.train_from_iterator((piece for text in texts for piece in cut(text)), trainer=trainer)
        except UnicodeEncodeError as error:
            raise not_unicode() from error
        return cls([(left, right) for left, right in json.loads(bpe.to_str())["model"]["merges"]])

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size})"

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens and ids that stand for nothing included."""
        return len(self._bytes)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes that an id stands for, which may end inside a character; none for a special token.

        Raises:
            DataError: There is no such id.

        Example:
            >>> Tokenizer.train(["never"], vocab_size=257).bytes_of(1)
            b'!'
        """
        return next(self._raw([token]))

    @property
    def bytes_per_token(self) -> npt.NDArray[np.int64]:
        """Number of UTF-8 bytes that each id stands for, 0 for special tokens: the unit of bits per byte."""
        return self._lengths.copy()

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Turns a text into ids, without an end of text or other special tokens.

        Raises:
            DataError: The text holds half a surrogate pair, which no UTF-8 can hold, or a character for
                which another model's tokenizer has no tokens.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Turns each text into ids, in parallel; see ``encode``."""
        parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in texts]
        try:
            pieces = [(n, piece) for n, text in enumerate(texts) for piece in self._steps.pieces(text)]
            for some in portions(pieces):
                raw = [piece for _, piece in some]
                encodings = self._bpe.encode_batch_fast(raw, add_special_tokens=False)
                for (number, _), encoding in zip(some, encodings, strict=True):
                    parts[number].append(np.array(encoding.ids, dtype=np.int64))
        except TypeError as error:
            raise not_unicode() from error
        found = [np.concatenate(part) for part in parts]
        for text, ids in zip(texts, found, strict=True):
            self._check_whole(text, ids)
        return found

    def _check_whole(self, text: str, ids: npt.NDArray[np.int64]) -> None:
        """Checks that no byte was lost: the tokenizers package leaves out silently what it has no token for."""
        text = self._steps.changed(text)
        wanted, num_bytes = len(text.encode()), int(self._lengths[ids].sum())
        if num_bytes != wanted:
            known = set(b"".join(self._bytes))
            lost = "".join(dict.fromkeys(one for one in text if not known.issuperset(one.encode())))
            raise DataError(
                got=f"{wanted} bytes of text, {num_bytes} bytes in tokens; characters without: {lost[:9]!r}",
                expected="text for all of which this tokenizer has tokens",
                do="leave such characters out of the text, or use a tokenizer with a token for every byte",
            )

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Turns ids into text; special tokens vanish, and bytes that form no character become U+FFFD.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        return b"".join(self._raw(ids)).decode("utf-8", errors="replace")

    def tokens(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Gives one readable string per id, for tables and plots: visible spaces, escapes, no line breaks.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        indices = [operator.index(token) for token in ids]
        return [
            readable(raw or self._names.get(index, f"<unused{index}>").encode())
            for index, raw in zip(indices, self._raw(indices), strict=True)
        ]

    def _raw(self, ids: Iterable[SupportsIndex]) -> Iterator[bytes]:
        for index in map(operator.index, ids):
            if not 0 <= index < self.vocab_size:
                raise DataError(
                    got=f"token id {index}",
                    expected=f"0 <= id < {self.vocab_size}",
                    do="decode with the tokenizer that made the ids",
                )
            yield self._bytes[index]

    @property
    def definition(self) -> str:
        """What decides ids and texts, as JSON: the merges of one of ours, the whole file of another."""
        return self.to_json() if self._told else json.dumps(self.merges)

    def to_json(self) -> str:
        """Writes it in the format of the ``tokenizers`` package, which can read it as well.

        In another model's tokenizer, the model notes which token ends a text; that package ignores it.
        """
        if not self._told:
            return str(self._bpe.to_str())
        description = json.loads(self._bpe.to_str())
        description["model"][TOLD] = self._told
        return json.dumps(description, ensure_ascii=False)

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that ``load`` reads; an existing file is left alone.

        Raises:
            ConfigError: The file exists.
        """
        try:
            with Path(path).open("x", encoding="utf-8") as file:
                file.write(self.to_json())
        except FileExistsError as error:
            raise ConfigError(
                got=f"{path}, which exists",
                expected="a new file",
                do="choose another name, or delete the file first",
            ) from error

    @classmethod
    def load(
        cls, path: str | Path, *, end_of_text: str | None = None, vocab_size: int | None = None
    ) -> "Tokenizer":
        """Reads a file that ``save`` wrote, or another model's tokenizer.json if it is a byte-level BPE.

        Args:
            path: The file.
            end_of_text: The token that ends a text, such as ``"<|endoftext|>"``. Needed only where a
                file that ``save`` did not write has several tokens that could, or none known.
            vocab_size: Number of ids, where the model has more than its tokenizer; these stand for nothing.

        Raises:
            DataError: The file is missing, damaged, holds another kind of tokenizer, or leaves open which
                token ends a text.
            ConfigError: No token of that name could end a text, or the file has more ids.
        """
        bpe, told = read(path)
        model = json.loads(bpe.to_str())["model"]
        merges = [(left, right) for left, right in model.get("merges", ())]
        asked = {"end_of_text": end_of_text, "vocab_size": vocab_size}
        told |= {key: value for key, value in asked.items() if value is not None}
        if told in ({}, {"end_of_text": END_OF_TEXT}) and model["vocab"] == vocabulary(merges):
            own = cls(merges)
            if own.to_json() == bpe.to_str():
                return own
        tokenizer = cls.__new__(cls)
        tokenizer._adopt(bpe, str(path), told.get("end_of_text"), told.get("vocab_size"))
        tokenizer.merges = tuple(merges)
        name = tokenizer._names[tokenizer.end_of_text]
        tokenizer._told = {"end_of_text": name, "vocab_size": tokenizer.vocab_size}
        return tokenizer


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Says how many bits a model needs per byte of text: comparable across tokenizers, unlike a loss.

    Args:
        nats: Sum (not mean) of the cross entropies of the predicted tokens.
        num_bytes: Bytes that those tokens stand for, ``tokenizer.bytes_per_token[targets].sum()``; >= 1.

    Returns:
        Bits per byte, >= 0; 8 is what storing the bytes as they are would take.

    Raises:
        DataError: num_bytes is below 1.

    Example:
        >>> bits_per_byte(math.log(256) * 10, num_bytes=10)
        8.0
    """
    if num_bytes < 1:
        raise DataError(
            got=f"num_bytes={num_bytes}",
            expected="num_bytes >= 1",
            do="evaluate at least one token that stands for text",
        )
    return nats / (math.log(2) * num_bytes)

"""The tokenizer: byte-level byte-pair encoding, so that every text has tokens and comes back unchanged."""

import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
import numpy.typing as npt
import tokenizers

from attention_residuals.errors import ConfigError, DataError

__all__ = ["Tokenizer", "bits_per_byte"]

_END_OF_TEXT = "<|endoftext|>"

# The tokenizers package needs over 100 bytes per character while it encodes, so long texts go in pieces.
_PIECE_CHARACTERS, _PIECES_AT_ONCE = 2**15, 64
_BEFORE_LINE_END = re.compile(r"(?<=[!-~])(?=\n)")


def _letters() -> dict[str, int]:
    """The visible letter that byte-level BPE writes for each byte, as letter -> byte, in order of letters."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _letters()


def _vocabulary(merges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Id 0 ends a text, then come the 256 bytes, then each merge's result in order."""
    vocabulary = {_END_OF_TEXT: 0}
    for piece in [*_BYTE_OF_LETTER, *(left + right for left, right in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    return vocabulary


class Tokenizer:
    """A byte-level BPE, fully given by its list of merges.

    Id 0 is ``<|endoftext|>``; no text turns into it, not even one that contains those very characters.
    Decoding what was encoded gives the same text, for every text.

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

    end_of_text: ClassVar[int] = 0

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        known = set(_BYTE_OF_LETTER)
        for left, right in merges:
            if left not in known or right not in known:
                raise DataError(
                    got=f"the merge {left!r} + {right!r}",
                    expected="pieces that are bytes or results of earlier merges",
                    do="train a tokenizer with Tokenizer.train, or load one that Tokenizer.save wrote",
                )
            known.add(left + right)
        self.merges = tuple(merges)
        vocabulary = _vocabulary(self.merges)
        self._bytes = [b"", *(_bytes(piece) for piece in vocabulary if piece != _END_OF_TEXT)]
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(self.merges)))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.add_special_tokens([_END_OF_TEXT])
        bpe.encode_special_tokens = True  # the characters <|endoftext|> in a text are just characters
        self._bpe = bpe

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
            special_tokens=[_END_OF_TEXT],
            initial_alphabet=list(_BYTE_OF_LETTER),
            show_progress=False,
        )
        try:
            bpe.train_from_iterator((piece for text in texts for piece in _cut(text)), trainer=trainer)
        except UnicodeEncodeError as error:
            raise _not_unicode() from error
        return cls([(left, right) for left, right in json.loads(bpe.to_str())["model"]["merges"]])

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size})"

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of text included."""
        return len(self._bytes)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes that an id stands for, which may end inside a character; none for the end of text.

        Raises:
            DataError: There is no such id.

        Example:
            >>> Tokenizer.train(["never"], vocab_size=257).bytes_of(1)
            b'!'
        """
        if not 0 <= token < self.vocab_size:
            raise DataError(
                got=f"token {token}",
                expected=f"0 to {self.vocab_size - 1}",
                do="use this model's own tokenizer",
            )
        return self._bytes[token]

    @property
    def bytes_per_token(self) -> npt.NDArray[np.int64]:
        """Number of UTF-8 bytes that each id stands for, 0 for the end of text: the unit of bits per byte."""
        return np.array([len(raw) for raw in self._bytes], dtype=np.int64)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Turns a text into ids, without an end of text.

        Raises:
            DataError: The text holds half a surrogate pair, which no UTF-8 can hold.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Turns each text into ids, in parallel; see ``encode``."""
        parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in texts]
        try:
            pieces = [(number, piece) for number, text in enumerate(texts) for piece in _cut(text)]
            for first in range(0, len(pieces), _PIECES_AT_ONCE):
                some = pieces[first : first + _PIECES_AT_ONCE]
                encodings = self._bpe.encode_batch_fast([piece for _, piece in some])
                for (number, _), encoding in zip(some, encodings, strict=True):
                    parts[number].append(np.array(encoding.ids, dtype=np.int64))
        except TypeError as error:
            raise _not_unicode() from error
        return [np.concatenate(part) for part in parts]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Turns ids into text; ends of text vanish, and bytes that form no character become U+FFFD.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        return b"".join(self._raw(ids)).decode("utf-8", errors="replace")

    def tokens(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Gives one readable string per id, for tables and plots: visible spaces, escapes, no line breaks.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        return [_readable(raw) if raw else _END_OF_TEXT for raw in self._raw(ids)]

    def _raw(self, ids: Iterable[SupportsIndex]) -> Iterator[bytes]:
        for index in map(operator.index, ids):
            if not 0 <= index < self.vocab_size:
                raise DataError(
                    got=f"token id {index}",
                    expected=f"0 <= id < {self.vocab_size}",
                    do="decode with the tokenizer that made the ids",
                )
            yield self._bytes[index]

    def to_json(self) -> str:
        """Writes it in the format of the ``tokenizers`` package, which can read it as well."""
        return str(self._bpe.to_str())

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
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a file that ``save`` wrote.

        Raises:
            DataError: The file is missing, damaged, or holds another kind of tokenizer.
        """
        try:
            model: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))["model"]
            merges = [(str(left), str(right)) for left, right in model["merges"]]
            same = model["vocab"] == _vocabulary(merges)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if not same:
            raise _unreadable(path, "its ids are not 0 for the end of text, then bytes, then merges")
        return cls(merges)


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


def _cut(text: str) -> Iterator[str]:
    """Cuts a long text where byte-level BPE cuts as well, so that its tokens stay the same."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        place = _BEFORE_LINE_END.search(text, start + _PIECE_CHARACTERS)
        if place is None:
            break
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def _bytes(piece: str) -> bytes:
    return bytes(_BYTE_OF_LETTER[letter] for letter in piece)


def _readable(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="backslashreplace").replace(" ", "␣")
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def _not_unicode() -> DataError:
    return DataError(
        got="a text that is no string, or holds half a surrogate pair (U+D800 to U+DFFF)",
        expected="text that UTF-8 can hold",
        do="repair it: text.encode('utf-8', errors='replace').decode()",
    )


def _unreadable(path: str | Path, why: str) -> DataError:
    return DataError(
        got=f"{path} ({why})",
        expected="a file that Tokenizer.save wrote",
        do="train a tokenizer with Tokenizer.train, or prepare the corpus again",
    )

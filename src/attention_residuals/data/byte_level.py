"""Our own byte-level BPE of a list of merges, texts in pieces that it can take, tokens that can be read."""

import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers

from attention_residuals.errors import DataError

__all__ = [
    "END_OF_TEXT",
    "LETTERS",
    "cut",
    "not_unicode",
    "ours",
    "portions",
    "readable",
    "vocabulary",
]

END_OF_TEXT = "<|endoftext|>"
"""How our own tokenizer calls the token that ends a text."""


# The tokenizers package needs over 100 bytes per character while it encodes, so long texts go in pieces.
_PIECE_CHARACTERS, _PIECES_AT_ONCE = 2**15, 64
_BEFORE_LINE_END = re.compile(r"(?<=[!-~])(?=\n)")


def _letters() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + number): byte for number, byte in enumerate(hidden)}


LETTERS = _letters()
"""The visible letter that byte-level BPE writes for each byte, as letter -> byte, in order of letters."""


def vocabulary(merges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Gives our ids: 0 ends a text, then come the 256 bytes, then each merge's result in order."""
    ids = {END_OF_TEXT: 0}
    for piece in [*LETTERS, *(left + right for left, right in merges)]:
        ids.setdefault(piece, len(ids))
    return ids


def ours(merges: Sequence[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Makes our own byte-level BPE.

    Raises:
        DataError: A merge of pieces that do not exist by then.
    """
    known = set(LETTERS)
    for left, right in merges:
        if left not in known or right not in known:
            raise DataError(
                got=f"the merge {left!r} + {right!r}",
                expected="pieces that are bytes or results of earlier merges",
                do="train a tokenizer with Tokenizer.train, or load one that Tokenizer.save wrote",
            )
        known.add(left + right)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary(merges), merges=list(merges)))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([END_OF_TEXT])
    return bpe


def cut(text: str) -> Iterator[str]:
    """Cuts a long text where byte-level BPE cuts as well, so that its tokens stay the same."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        place = _BEFORE_LINE_END.search(text, start + _PIECE_CHARACTERS)
        if place is None:
            break
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def portions(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Gathers pieces to be encoded at once: many for speed, few enough for the memory."""
    some: list[tuple[int, str]] = []
    for piece in pieces:
        some.append(piece)
        full = sum(len(text) for _, text in some) >= _PIECE_CHARACTERS * _PIECES_AT_ONCE
        if full or len(some) == _PIECES_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def readable(raw: bytes) -> str:
    """Writes bytes so that all of them can be seen: visible spaces, escapes, no line breaks."""
    text = raw.decode("utf-8", errors="backslashreplace").replace(" ", "␣")
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def not_unicode() -> DataError:
    """Says that a text is none."""
    return DataError(
        got="a text that is no string, or holds half a surrogate pair (U+D800 to U+DFFF)",
        expected="text that UTF-8 can hold",
        do="repair it: text.encode('utf-8', errors='replace').decode()",
    )

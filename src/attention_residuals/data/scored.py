"""Which tokens of a text count in the loss, from ranges of its characters."""

import numpy as np
import numpy.typing as npt

from attention_residuals.data.sources import Document
from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import DataError

__all__ = ["check_ranges", "scored_tokens"]


def check_ranges(document: Document) -> None:
    """Checks that a document's scored ranges lie in its text, in order and apart.

    Raises:
        DataError: They do not.
    """
    last = 0
    for one in document.scored or ():
        first, end = one
        if not last <= first < end <= len(document.text):
            raise DataError(
                got=f"document {document.name!r} of {len(document.text)} characters, scored at {one}",
                expected="ranges (first, one after the last) in the text, in order, none in another",
                do="count characters from 0, as in text[first:last]",
            )
        last = end


def scored_tokens(
    document: Document, ids: npt.NDArray[np.int64], tokenizer: Tokenizer
) -> npt.NDArray[np.bool_]:
    """Says of the end of text before a document, and of each of its tokens, whether it counts.

    Args:
        document: A text with ranges, or without: then all count.
        ids: Its tokens.
        tokenizer: What made them.

    Raises:
        DataError: The tokenizer changes the text, so its ranges mean nothing.

    Example:
        >>> tokenizer = Tokenizer([])
        >>> sum_ = Document("sum", "1+2=3", scored=((4, 5),))
        >>> scored_tokens(sum_, tokenizer.encode(sum_.text), tokenizer).astype(int).tolist()
        [0, 0, 0, 0, 0, 1]
    """
    if document.scored is None:
        return np.ones(len(ids) + 1, dtype=np.bool_)
    counts = np.zeros(len(document.text), dtype=np.bool_)
    for first, end in document.scored:
        counts[first:end] = True
    by_byte = np.repeat(counts, [len(character.encode()) for character in document.text])
    ends = tokenizer.bytes_per_token[ids].cumsum()
    # Some tokenizers put a space before a text; any other change moves characters we know not where.
    told = tokenizer.decode(ids)
    if told not in (document.text, f" {document.text}"):
        raise DataError(
            got=f"a tokenizer that turns document {document.name!r} into {told[:40]!r}",
            expected="one that keeps the text, since some of it is scored and some is not",
            do="take a tokenizer without normalisation, or leave out scored",
        )
    return np.insert(by_byte[(ends - 1 - (len(told) - len(document.text))).clip(0)], 0, False)

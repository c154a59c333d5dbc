"""The closed vocabulary of the step-by-step texts: pools of words, and a tokenizer with one id for each word."""

import json
import tempfile
from pathlib import Path

from attention_residuals.data.byte_level import END_OF_TEXT
from attention_residuals.data.tokenizer import Tokenizer

__all__ = [
    "COLOURS",
    "CREATURES",
    "DAYS",
    "EVENTS",
    "LETTERS",
    "MONTHS",
    "NUMBERS",
    "ORDINALS",
    "PEOPLE",
    "REMARKS",
    "REMARK_WEIGHTS",
    "VERDICTS",
    "word_tokenizer",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LETTERS = tuple("bcdefghjklmnpqrstuvw")
PEOPLE = _words(
    "anna ben carl dora emil fay gus hana ivan jill kurt lena milo nora omar pia ravi sara tom vera"
)
EVENTS = _words(
    "fair race feast match concert parade picnic exam trial lecture auction wedding market play dance "
    "hike regatta sale vote show"
)
NUMBERS = tuple(map(str, range(60)))
CREATURES = _words(
    "ant bat bee cat cow crab deer dog duck eel fox frog goat hare hen lion lynx mole mouse newt owl "
    "pig rat seal"
)
COLOURS = _words(
    "amber azure beige black blue bronze brown coral cream crimson gold green grey ivory lilac lime "
    "navy olive pink plum red teal violet white"
)
DAYS = _words("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = _words("january february march april may june july august september october november december")
ORDINALS = _words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)

REMARKS = _words("today here indeed surely gladly perhaps quietly oddly briefly softly lately calmly")
"""Words of the free slot after a claim, the most common first; none of them bears on anything."""

REMARK_WEIGHTS = tuple(2.0 ** -min(rank, len(REMARKS) - 1) for rank in range(1, len(REMARKS) + 1))
"""How often training texts use each remark: halves from one to the next, so 0.7 to 7.6 nats; sums to 1."""

VERDICTS = ("fine", "conflict")
"""How a text ends: no claim in it contradicts what it states, or one does."""


def word_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Makes a tokenizer that has one id for each word, and no others but the end of text.

    It is a byte-level BPE without merges whose vocabulary is the words, each with the space before it. So
    every edit of a word is an edit of one token, and a text with any other word is refused, not split.

    Args:
        words: All different, of letters only, digits only, or signs only; word number i gets id i + 1.

    Returns:
        The tokenizer; id 0 ends a text.

    Example:
        >>> tokenizer = word_tokenizer(("red", "is", "7", "."))
        >>> tokenizer.encode("7 is red .").tolist()
        [3, 2, 1, 4]
        >>> tokenizer.encode("7 is blue .")
        Traceback (most recent call last):
        ...
        attention_residuals.errors.DataError: got: 12 bytes of text, 7 bytes in tokens; characters without: 'blu'
        expected: text for all of which this tokenizer has tokens
        do: leave such characters out of the text, or use a tokenizer with a token for every byte
    """
    space = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    end = {"id": 0, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {END_OF_TEXT: 0, **{f"Ġ{word}": index for index, word in enumerate(words, start=1)}},
        "merges": [],
    }
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": model,
    }
    # Tokenizer.load checks a foreign file in every way, so this takes that road too.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(json.dumps(description), encoding="utf-8")
        return Tokenizer.load(path)

"""Text from tokens one at a time: no half characters, and nothing from a stop string on."""

import codecs
from collections.abc import Sequence

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import ConfigError

__all__ = ["TextStream"]


class TextStream:
    r"""Turns the tokens of one sequence into text, as soon as it is certain.

    A token may end inside a character; its bytes are held back until the character is whole. What may be the
    beginning of a stop string is held back until that is decided.

    Args:
        tokenizer: Whose tokens come.
        stop: Strings before the first of which the text ends: the first that is complete, and of several
            complete with the same letter the longest.

    Raises:
        ConfigError: An empty stop string.

    Example:
        >>> from attention_residuals.data import Tokenizer
        >>> tokenizer = Tokenizer.train(["never"], vocab_size=257)
        >>> stream = TextStream(tokenizer, stop=["\n\n"])
        >>> [stream.push(token) for token in tokenizer.encode("a\nb\n\nc").tolist()], stream.stopped
        (['a', '', '\nb', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
            raise ConfigError(
                got=f"stop={stop!r}",
                expected="a list of strings, none of them empty",
                do="pass a list such as ['END']",
            )
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain now."""
        return "" if self.stopped else self._take(self._characters.decode(self.tokenizer.bytes_of(token)))

    def finish(self) -> str:
        """Returns what was held back, when no token follows; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        certain = self._take(self._characters.decode(b"", final=True))
        rest, self._held = self._held, ""
        return certain + rest

    def _take(self, text: str) -> str:
        text = self._held + text
        # First complete, first obeyed: so the cut does not depend on where tokens end.
        found = [(place + len(string), place) for string in self.stop if (place := text.find(string)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, string) for string in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """Counts how many letters at the end of a text may begin a string."""
    longest = min(len(text), len(string) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)

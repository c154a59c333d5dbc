"""Text streamed token by token is the decoded text, cut at the first complete stop string, as early as can be."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention_residuals.data import Tokenizer
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.inference import TextStream

TRAINED = Tokenizer.train(
    ["the cat sat on the mat, naïve café 🐈 🐈 ends here END of it\n\n"] * 9, vocab_size=300
)
BYTES_ONLY = Tokenizer([])
WHOLE = Tokenizer([("a", "b"), ("c", "d"), ("ab", "cd")])
TOKENIZERS = [TRAINED, BYTES_ONLY, WHOLE]
IDS = {BYTES_ONLY.bytes_of(token): token for token in range(257)}
# The last byte of a character varies within 64 characters, so every 64th shows all beginnings. Python's
# decoder waits for the third byte of half a surrogate pair too, though that is never a character.
BEGUN = {
    raw[:count]
    for raw in (chr(point).encode(errors="surrogatepass") for point in range(0x80, 0x110000, 64))
    for count in range(1, len(raw))
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
stops = st.lists(st.text("ab\ufffd🐈é", min_size=1, max_size=4), max_size=3)
# Whole characters, their pieces and bytes that no text has.
byte_strings = st.lists(
    st.sampled_from(
        [*"abé🐈".encode(), *(letter.encode() for letter in "ab🐈é"), b"\xc0", b"\xed\xa0", b"\xff"]
    )
    | st.integers(0, 255),
    max_size=20,
).map(lambda parts: b"".join(part if isinstance(part, bytes) else bytes([part]) for part in parts))


def streamed(tokenizer, tokens, stop=()):
    stream = TextStream(tokenizer, stop)
    return [*(stream.push(int(token)) for token in tokens), stream.finish()], stream.stopped


def cut(text, stop):
    """Letter by letter: the text before the stop string that is complete first, and whether there is one."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=texts, stop=stops)
@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["trained", "bytes", "whole"])
def test_pieces_of_any_text_join_to_it(tokenizer, text, stop):
    pieces, stopped = streamed(tokenizer, tokenizer.encode(text), stop)
    assert ("".join(pieces), stopped) == cut(text, stop)


@given(tokens=st.lists(st.integers(0, 256), max_size=30), stop=stops)
@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["trained", "bytes", "whole"])
def test_any_tokens_join_to_what_the_tokenizer_decodes(tokenizer, tokens, stop):
    pieces, stopped = streamed(tokenizer, tokens, stop)
    assert ("".join(pieces), stopped) == cut(tokenizer.decode(tokens), stop)


@given(raw=byte_strings, stop=stops)
@example(raw=b"\xed\xa0\x80 \xf4\x90\x80\x80 \xe0\x80 \xf0\x9f\x90", stop=[])
@example(raw=b"a\xf0", stop=["a\ufffd"])
def test_all_that_is_certain_is_given_out_at_once_and_nothing_else(raw, stop):
    stream, given_out = TextStream(BYTES_ONLY, stop), ""
    for count in range(1, len(raw) + 1):
        given_out += stream.push(IDS[raw[count - 1 : count]])
        begun = next((k for k in (3, 2, 1) if k <= count and raw[count - k : count] in BEGUN), 0)
        certain, stopped = cut(raw[: count - begun].decode(errors="replace"), stop)
        undecided = [certain.endswith(string[:k]) * k for string in stop for k in range(1, len(string))]
        held = 0 if stopped else max(undecided, default=0)
        assert given_out == certain[: len(certain) - held]
        assert stream.stopped == stopped
    assert (given_out + stream.finish(), stream.stopped) == cut(raw.decode(errors="replace"), stop)


@given(text=st.text("abcd", max_size=12), stop=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3))
@example(text="abcd", stop=["abcd", "bc"])
@example(text="abcd", stop=["cd", "abcd"])
def test_the_cut_does_not_depend_on_where_tokens_end(text, stop):
    cuts = {
        ("".join(pieces), stopped)
        for pieces, stopped in (streamed(tokenizer, tokenizer.encode(text), stop) for tokenizer in TOKENIZERS)
    }
    assert cuts == {cut(text, stop)}


def test_a_possible_stop_string_is_held_back_until_it_is_decided():
    tokens = [int(token) for letter in "ENx" for token in TRAINED.encode(letter)]
    assert streamed(TRAINED, tokens, ["END"]) == (["", "", "ENx", ""], False)


def test_what_is_held_back_comes_once_and_half_a_character_as_a_replacement():
    stream = TextStream(BYTES_ONLY)
    assert stream.push(IDS[b"\xf0"]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    held = TextStream(BYTES_ONLY, ["ab"])
    assert [held.push(IDS[b"a"]), held.finish(), held.finish()] == ["", "a", ""]


def test_an_end_of_text_within_a_character_vanishes_as_in_decoding():
    first, second = (int(token) for token in BYTES_ONLY.encode("é"))
    assert streamed(BYTES_ONLY, [first, Tokenizer.end_of_text, second])[0] == ["", "", "é", ""]


def test_after_a_stop_string_nothing_comes():
    stream = TextStream(TRAINED, ["t"])
    assert "".join(stream.push(int(token)) for token in TRAINED.encode("cat sat")) == "ca"
    assert stream.stopped
    assert stream.push(5) == stream.finish() == ""
    ends_in_half = Tokenizer([("t", "ð")])  # the letter of byte F0
    stream = TextStream(ends_in_half, ["t"])
    assert ends_in_half.bytes_of(257) == b"t\xf0"
    assert stream.push(257) == stream.finish() == ""


def test_what_makes_no_sense_is_refused():
    for stop in (["a", ""], "END"):
        with pytest.raises(ConfigError, match="none of them empty"):
            TextStream(TRAINED, stop)
    with pytest.raises(DataError, match="999"):
        TextStream(TRAINED).push(999)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.data import Tokenizer
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.inference import TextStream

TOKENIZER = Tokenizer.train(
    ["the cat sat on the mat, naïve café 🐈 🐈 ends here END of it\n\n"] * 9, vocab_size=300
)


def streamed(tokens, stop=()):
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text):
    pieces, stream = streamed(TOKENIZER.encode(text).tolist())
    assert "".join(pieces) == text
    assert not stream.stopped


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_tokens_join_to_what_the_tokenizer_decodes(tokens):
    assert "".join(streamed(tokens)[0]) == b"".join(map(TOKENIZER.bytes_of, tokens)).decode(errors="replace")


@given(
    st.text(alphabet="abc🐈", max_size=30),
    st.lists(st.text(alphabet="abc🐈", min_size=1, max_size=4), max_size=3),
)
def test_nothing_is_given_out_from_the_first_complete_stop_string_on(text, stop):
    pieces, stream = streamed(TOKENIZER.encode(text).tolist(), stop)
    given_out = "".join(pieces)
    assert text.startswith(given_out)
    assert not any(string in given_out for string in stop)
    assert stream.stopped == any(string in text for string in stop)
    if stream.stopped:
        assert any(text.startswith(given_out + string) for string in stop)
    else:
        assert given_out == text


def test_a_character_comes_whole_and_a_possible_stop_string_is_held_back():
    tokens = TOKENIZER.encode("é").tolist()
    assert "".join(streamed(tokens)[0]) == "é"
    pieces, _ = streamed(
        [token for text in ("E", "N", "x") for token in TOKENIZER.encode(text).tolist()], ["END"]
    )
    assert pieces == ["", "", "ENx", ""]


def test_half_a_character_at_the_end_becomes_a_replacement():
    half = next(token for token in range(TOKENIZER.vocab_size) if TOKENIZER.bytes_of(token) == b"\xf0")
    stream = TextStream(TOKENIZER)
    assert stream.push(half) == ""
    assert stream.finish() == "�"
    assert stream.finish() == ""


def test_after_a_stop_string_nothing_comes():
    stream = TextStream(TOKENIZER, ["t"])
    assert "".join(stream.push(token) for token in TOKENIZER.encode("cat sat").tolist()) == "ca"
    assert stream.stopped
    assert stream.push(5) == stream.finish() == ""


def test_what_makes_no_sense_is_refused():
    for stop in (["a", ""], "END"):
        with pytest.raises(ConfigError, match="none of them empty"):
            TextStream(TOKENIZER, stop)
    with pytest.raises(DataError, match="token 999"):
        TextStream(TOKENIZER).push(999)

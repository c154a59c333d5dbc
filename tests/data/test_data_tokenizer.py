"""Every text survives the tokenizer, byte for byte, and nothing in a text can end it."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from attention_residuals.data import Tokenizer, bits_per_byte, byte_level
from attention_residuals.errors import ConfigError, DataError

TEXTS = [
    "the cat sat on the mat, the cat's hat\n" * 20,
    "héllo ☃ <|endoftext|> 🙂🙂 🙂\n\n\t x" * 20,
    "a\n\n\n\n b" * 20,
]
TRAINED = Tokenizer.train(TEXTS, vocab_size=320)
BYTES_ONLY = Tokenizer([])

any_text = st.text(st.characters(exclude_categories=["Cs"]))


@given(text=any_text)
@example(text="")
@example(text=" ")
@example(text="\n \r\n\t\x00\x1c\x85\u2028 ")
@example(text="👩‍👩‍👧 e\u0301 \ufeff\ufffd \U0010ffff Ġ Ċ")
@example(text="<|endoftext|>")
@pytest.mark.parametrize("of", [TRAINED, BYTES_ONLY], ids=["trained", "bytes only"])
def test_every_text_comes_back_and_its_bytes_add_up(of, text):
    ids = of.encode(text)
    assert of.decode(ids) == text
    assert of.bytes_per_token[ids].sum() == len(text.encode())
    assert not (ids == Tokenizer.end_of_text).any()


@given(before=any_text, after=any_text)
def test_characters_of_the_end_of_text_are_just_characters(before, after):
    ids = TRAINED.encode(f"{before}<|endoftext|>{after}")
    assert 0 not in ids
    assert TRAINED.decode(ids) == f"{before}<|endoftext|>{after}"


def test_training_on_the_characters_of_the_end_of_text_makes_no_token_of_them():
    greedy = Tokenizer.train(["<|endoftext|>" * 50, " <|endoftext|> " * 50], vocab_size=400)
    assert 0 not in greedy.encode("<|endoftext|>")


@given(texts=st.lists(any_text, max_size=5))
def test_a_batch_encodes_each_text_as_if_alone(texts):
    batch = TRAINED.encode_batch(texts)
    assert len(batch) == len(texts)
    for ids, text in zip(batch, texts, strict=True):
        assert ids.dtype == np.int64
        assert ids.tolist() == TRAINED.encode(text).tolist()


line = st.text(st.sampled_from("ab\n\n\n\n \t'sé\u2028\x1c\r.1"), max_size=40)


@given(text=line.map(lambda some: some * 9), size=st.integers(1, 12), at_once=st.integers(1, 3))
@example(text="a\n\n\n\n b", size=1, at_once=1)
def test_cutting_long_texts_changes_no_token(text, size, at_once):
    whole, merges = TRAINED.encode(text), Tokenizer.train([text], 270).merges
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_level, "_PIECE_CHARACTERS", size)
        patch.setattr(byte_level, "_PIECES_AT_ONCE", at_once)
        assert TRAINED.encode(text).tolist() == whole.tolist()
        assert Tokenizer.train([text], 270).merges == merges


def test_long_texts_are_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(byte_level, "_PIECE_CHARACTERS", 100)
    pieces = list(byte_level.cut("a line of text\n" * 100))
    assert "".join(pieces) == "a line of text\n" * 100
    assert max(map(len, pieces)) < 120
    assert list(byte_level.cut("x" * 1000)) == ["x" * 1000]


def test_merges_are_the_library_s_own_with_the_same_ids():
    bpe = tokenizers.Tokenizer.from_str(TRAINED.to_json())
    text = "the cat's hat é 🙂\n"
    assert bpe.encode(text).ids == TRAINED.encode(text).tolist()
    assert bpe.get_vocab_size() == TRAINED.vocab_size
    assert bpe.token_to_id("<|endoftext|>") == 0
    assert bpe.decode(TRAINED.encode(text).tolist()) == text


def test_training_learns_common_pieces():
    assert TRAINED.tokens(TRAINED.encode("the cat")) == ["the", "␣cat"]
    assert len(TRAINED.encode(TEXTS[0])) < len(BYTES_ONLY.encode(TEXTS[0])) / 2


def test_training_is_the_same_in_every_process():
    code = (
        "from attention_residuals.data import StandardLibrary, Tokenizer\n"
        "from itertools import islice\n"
        "texts = [document.text for document in islice(StandardLibrary().documents(), 40)]\n"
        "print(Tokenizer.train(texts, 1000).to_json())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(threads)},
            check=True,
            capture_output=True,
        ).stdout
        for seed, threads in [(1, 1), (2, 4)]
    }
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())["model"]["vocab"]) == 1000


def test_vocabulary_is_the_end_then_the_bytes_then_the_merges():
    assert BYTES_ONLY.vocab_size == 257
    assert BYTES_ONLY.bytes_per_token.tolist() == [0] + [1] * 256
    assert TRAINED.vocab_size <= 320
    assert TRAINED.bytes_per_token[257:].min() >= 2
    assert sorted(BYTES_ONLY._bytes[1:]) == [bytes([byte]) for byte in range(256)]


def test_two_ways_to_the_same_piece_share_one_id():
    twice = Tokenizer([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")])
    assert twice.vocab_size == 257 + 3
    assert twice.decode(twice.encode("abc bc ab")) == "abc bc ab"


@pytest.mark.parametrize("vocab_size", [-1, 0, 256])
def test_vocabulary_that_cannot_hold_the_bytes_is_refused(vocab_size):
    with pytest.raises(ConfigError, match=f"vocab_size={vocab_size}\n.*257"):
        Tokenizer.train(["a"], vocab_size)


def test_a_small_text_gives_a_smaller_vocabulary_than_asked():
    assert Tokenizer.train(["abcdef"], 1000).vocab_size == 257


def test_single_tokens_are_readable():
    shown = TRAINED.tokens([0, *BYTES_ONLY.encode("a \n\x00é")])
    assert shown == ["<|endoftext|>", "a", "␣", "\\n", "\\x00", "\\xc3", "\\xa9"]
    assert all(token.isprintable() for token in TRAINED.tokens(range(TRAINED.vocab_size)))


def test_decoding_drops_ends_of_text_and_replaces_broken_characters():
    ids = [0, *TRAINED.encode("é").tolist(), 0, *BYTES_ONLY.encode("é")[:1]]
    assert TRAINED.decode(np.array(ids, dtype=np.uint16)) == "é\ufffd"


@pytest.mark.parametrize("index", [-1, 257])
def test_unknown_ids_are_refused(index):
    with pytest.raises(DataError, match=f"token id {index}\n.*< 257"):
        BYTES_ONLY.decode([1, index])
    with pytest.raises(DataError, match=f"token id {index}"):
        BYTES_ONLY.tokens([index])


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(DataError, match="half a surrogate pair"):
        TRAINED.encode("a\ud800")
    with pytest.raises(DataError, match="half a surrogate pair"):
        Tokenizer.train(["a\ud800"], 300)


def test_merges_of_unknown_pieces_are_refused():
    with pytest.raises(DataError, match="'ab' \\+ 'c'"):
        Tokenizer([("ab", "c")])


def test_saved_tokenizer_loads_the_same(tmp_path):
    TRAINED.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.merges == TRAINED.merges
    assert loaded.to_json() == TRAINED.to_json()
    assert 0 not in loaded.encode("<|endoftext|>")


def test_saving_overwrites_nothing(tmp_path):
    (tmp_path / "t.json").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        TRAINED.save(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "mine"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"merges": [["a"]], "vocab": {}}}', "\ud800"]
)
def test_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=r"t.json \((.|\n)*Tokenizer.save"):
        Tokenizer.load(tmp_path / "t.json")


def test_missing_file_and_foreign_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match="FileNotFoundError"):
        Tokenizer.load(tmp_path / "t.json")
    foreign = json.loads(TRAINED.to_json())
    foreign["model"]["vocab"] |= {"<|endoftext|>": 1, "!": 0}
    (tmp_path / "t.json").write_text(json.dumps(foreign))
    with pytest.raises(DataError, match="its ids are not"):
        Tokenizer.load(tmp_path / "t.json")


@given(num_bytes=st.integers(1, 10**9))
def test_guessing_every_byte_costs_eight_bits(num_bytes):
    assert bits_per_byte(num_bytes * math.log(256), num_bytes) == pytest.approx(8.0, rel=1e-12)
    assert bits_per_byte(0.0, num_bytes) == 0.0


def test_bits_per_byte_of_no_bytes_is_an_error():
    with pytest.raises(DataError, match="num_bytes=0"):
        bits_per_byte(1.0, 0)

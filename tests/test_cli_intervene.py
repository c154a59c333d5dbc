"""Edits and sweeps, as a person types them."""

import csv
import json
import re

import pytest
from page.page_content import decoded

from attention_residuals.cli import main
from attention_residuals.trace import Trace, sweeps


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (texts / f"{number}.txt").write_text(
            f"Once upon a time {number} ducks swam to pond {number % 7}.\n" * 6
        )
    folder = tmp_path_factory.mktemp("runs") / "block"
    small = ["--source", str(texts), "--depth", "3", "--vocab-size", "280", "--sequence-length", "16"]
    assert (
        main(["train", str(folder), *small, "--batch-size", "2", "--num-steps", "3", "--residual", "block:2"])
        == 0
    )
    return folder


def traces_of(path):
    """Reads the passes in a page."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.DOTALL).group(1))["traces"]


def edits_in(folder, text):
    path = folder / "edits.yaml"
    path.write_text(text)
    return str(path)


def test_edits_are_made_and_told(trained, tmp_path, capsys):
    edits = edits_in(
        tmp_path, '- {type: Drop, sites: L1.mlp, sources: embedding}\n- {type: Skip, layers: ["2.."]}\n'
    )
    out = tmp_path / "trace"
    assert main(["intervene", str(trained), "Once upon", "--edits", edits, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Drop: fired once, at L1.mlp; changed a weight by up to 0.")
    assert lines[1].startswith("Skip: fired 2 times, at L2.attention, L2.mlp; ")
    assert lines[3].split()[:3] == ["token", "KL", "loss"]
    assert len([line for line in lines if "->" in line]) - 1 == Trace.load(out).tokens.shape[1]
    assert Trace.load(out)["L1.mlp"].weights[0].eq(0).all()
    assert "with edits" in (out / "page.html").read_text(encoding="utf-8")
    assert {path.name for path in out.iterdir()} == {
        *("trace.json", "trace.safetensors", "tokens.csv", "page.html"),
        *("attention.png", "attention.svg", "mlp.png", "mlp.svg"),
    }
    with (out / "tokens.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, line in zip(rows, lines[4:], strict=False):
        assert line.split()[0] == row["spelled"].strip()
        assert float(line[17:25]) == pytest.approx(float(row["kl_nats"]), abs=1e-3)
    assert rows[-1]["loss_change_nats"] == ""


def test_the_clean_pass_of_the_page_is_equal_bit_by_bit_where_no_edit_reaches(trained, tmp_path):
    edits = edits_in(tmp_path, "- {type: Drop, sites: L1.mlp, sources: embedding, positions: [-1]}\n")
    out = tmp_path / "trace"
    assert main(["intervene", str(trained), "Once upon a time", "--edits", edits, "--out", str(out)]) == 0
    clean, edited = (traces_of(out / "page.html")[number] for number in (0, 1))
    for one in (clean, edited):
        assert re.fullmatch(r"[0-9a-f]{12,}", one["about"]["checkpoint"])
    length = len(clean["tokens"]["ids"][0])
    weights = [decoded(one["arrays"]["weight"]).reshape(-1, length) for one in (clean, edited)]
    assert (weights[0][:, :-1] == weights[1][:, :-1]).all()
    assert (weights[0] != weights[1]).any()


def test_what_cannot_be_edited_is_told(trained, tmp_path, capsys):
    for text, code, message in (
        ("- {type: Drop, sites: L9.mlp, sources: embedding}", 2, "did you mean"),
        ("- {type: Drop, sites: L1.mlp, sources: B7}", 2, "B7"),
        ("- {type: Dropp, sites: L1.mlp, sources: B1}", 2, "did you mean 'Drop'"),
        ("- {type: Drop, sites: L0.attention, sources: embedding}", 1, "embedding"),
        ("just a text", 2, "list"),
    ):
        assert main(["intervene", str(trained), "Once", "--edits", edits_in(tmp_path, text)]) == code, text
        error = capsys.readouterr().err
        assert message in error
        assert "\ndo: " in error
    edits = edits_in(tmp_path, "- {type: Skip, layers: [1]}")
    assert main(["intervene", str(trained), "", "--edits", edits]) == 2
    assert main(["intervene", str(trained), "Once", "--edits", edits, "--out", str(tmp_path)]) == 2


def test_a_sweep_is_written_drawn_and_gone_on_with(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "sweep"
    command = ["sweep", str(trained), str(out), "--num-texts", "4", "--length", "12"]
    calls = [0]
    original = sweeps.intervene

    def stopping(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "intervene", stopping)
        assert main(command) == 130
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "rank correlation of norm share and effect" in printed
    with (out / "effects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["sites"] == "L0.mlp"
    assert all(float(row["kl_nats"]) >= 0 for row in rows)
    for name, start in (("effects.png", b"\x89PNG"), ("effects.svg", b"<?xml")):
        assert (out / name).read_bytes().startswith(start)
    page = (out / "page.html").read_bytes()
    assert main(command) == 0  # again: nothing is left to sweep, and the same is written
    assert (out / "page.html").read_bytes() == page


def test_sources_and_pairs_are_swept(trained, tmp_path, capsys):
    few = ["--num-texts", "2", "--length", "8"]
    assert main(["sweep", str(trained), str(tmp_path / "sources"), "--what", "sources", *few]) == 0
    assert "without embedding" in capsys.readouterr().out
    pairs = ["--what", "pairs", "--site", "L2.mlp"]
    assert main(["sweep", str(trained), str(tmp_path / "pairs"), *pairs, *few]) == 0
    assert "['embedding', 'B1']" in capsys.readouterr().out
    for wrong, message in (
        (["--what", "pairs"], "--site with pairs"),
        (["--what", "pairs", "--site", "L0.mlp"], "a site with three sources"),
        (["--length", "100000"], "shorten --length"),
    ):
        assert main(["sweep", str(trained), str(tmp_path / "no"), *few, *wrong]) == 2
        assert message in capsys.readouterr().err

"""Edits and sweeps, as a person types them."""

import csv

import pytest

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
    assert lines[0].startswith("Drop: 1 times at L1.mlp; largest change of a weight 0.")
    assert lines[1].startswith("Skip: 2 times at L2.attention, L2.mlp; ")
    assert lines[3].split()[:3] == ["token", "KL", "loss"]
    assert len([line for line in lines if "->" in line]) - 1 == Trace.load(out).tokens.shape[1]
    assert Trace.load(out)["L1.mlp"].weights[0].eq(0).all()
    assert "with edits" in (out / "page.html").read_text(encoding="utf-8")


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

"""The main job, made tiny: everything but the numbers is what ``attnres demo`` gives."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from attention_residuals.cli import main
from attention_residuals.data import TextFiles
from attention_residuals.demo import Demo, run_demo
from attention_residuals.demo import demo as module
from attention_residuals.demo.findings import verdict
from attention_residuals.errors import ConfigError

PICTURES = ("loss", "magnitude", "gradient", "routing", "prompt")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number}.py").write_text(f"def f{number}(a, b):\n    return a + {number} * b\n" * 8)
    source = TextFiles(path=str(folder))
    return Demo(source=source, num_steps=4, vocab_size=280, sequence_length=16, batch_size=2)


@pytest.fixture(scope="module")
def finished(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, run_demo(demo, folder, progress=False)


def test_both_models_start_from_the_same_weights_and_see_the_same_data(finished):
    folder, _ = finished
    configs = [json.loads((folder / name / "config.json").read_text()) for name in ("standard", "block")]
    rules = [config["train"]["model"].pop("residual")["type"] for config in configs]
    assert rules == ["StandardResidual", "AttnRes"]
    assert configs[0] == configs[1]


def test_the_report_holds_every_picture_and_needs_no_network(finished):
    folder, _ = finished
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert "http:" not in page
    assert "https:" not in page
    assert '"traces":[{"name":"Block AttnRes"' in page
    assert all((folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in PICTURES)

    headings = []

    class Headings(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag in ("h1", "h2"):
                headings.append(tag)

    Headings().feed(page)
    assert headings[:6] == ["h1", *["h2"] * 5]


def test_the_verdict_quotes_the_numbers_that_were_measured(finished):
    folder, (standard, routed) = finished
    sentences = verdict(standard, routed)
    assert len(sentences) == 6
    assert not any("{" in sentence for sentence in sentences)
    assert all(sentence.startswith(("Seen", "Not seen", "Hardly seen", "No clear")) for sentence in sentences)
    assert f"{standard.bits_per_byte:.3f}" in sentences[0]
    assert f"{routed.bits_per_byte:.3f}" in sentences[0]
    numbers = json.loads((folder / "findings.json").read_text())
    assert [found["bits_per_byte"] for found in numbers] == [standard.bits_per_byte, routed.bits_per_byte]


def test_the_verdict_turns_with_the_numbers(finished):
    _, (standard, routed) = finished
    flat, rising = (1.0,) * 8, tuple(float(layer) for layer in range(1, 9))

    def openings(magnitudes=(flat, flat), gradients=(flat, flat), bits=(1.0, 1.0)):
        changed = [
            replace(found, magnitudes=m, gradients=g, bits_per_byte=b)
            for found, m, g, b in zip((standard, routed), magnitudes, gradients, bits, strict=True)
        ]
        return [sentence.split(":")[0] for sentence in verdict(*changed)[:3]]

    assert openings() == ["No clear difference", "Seen in part", "No clear difference"]
    assert openings((rising, flat), (rising, flat), (1.0, 0.9)) == ["Seen"] * 3
    opposite = openings((flat, rising), (flat, rising), (0.9, 1.0))
    assert opposite == ["Not seen, but the opposite", "Not seen", "Not seen, but the opposite"]
    # A sawtooth that starts anew with each block of two layers is bounded, whatever its teeth.
    assert openings(magnitudes=(rising, (0.5, 1.0) * 4))[1] == "Seen"


def test_profiles_have_a_value_for_each_layer(finished):
    for found in finished[1]:
        assert len(found.magnitudes) == len(found.gradients) == 8
        assert all(value > 0 for value in (*found.magnitudes, *found.gradients))
        assert torch.isfinite(found.prompt["output"].weights).all()


def test_a_finished_demo_is_not_written_over(demo, finished):
    with pytest.raises(ConfigError, match="which is finished"):
        run_demo(demo, finished[0], progress=False)


def test_a_demo_without_its_report_writes_it_again_from_the_runs(demo, finished):
    folder, findings = finished
    (folder / "report.html").unlink()
    again = run_demo(demo, folder, progress=False)
    assert [found.curve for found in again] == [found.curve for found in findings]
    assert (folder / "report.html").exists()


def test_an_interrupted_demo_says_so(demo, tmp_path, monkeypatch):
    class Interrupted:
        interrupted = True

    monkeypatch.setattr(module, "train", lambda *_, **__: Interrupted())
    assert run_demo(demo, tmp_path / "new", progress=False) is None


def test_the_command_prints_curves_and_verdict(demo, tmp_path, capsys):
    arguments = ["demo", "--source", demo.source.path, "--folder", str(tmp_path / "demo"), "--num-steps", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("bits per byte: ") == 2
    assert str(tmp_path / "demo" / "report.html") in out

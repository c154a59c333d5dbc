"""The page as a file, in a notebook, from the command line and from the demo: one document for all."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import torch
from page_content import Words, model_of, recorded, tokens_of

from attention_residuals import Decoder, page, presets, record
from attention_residuals.cli import main
from attention_residuals.data import Tokenizer
from attention_residuals.errors import CheckpointError
from attention_residuals.models import save_model
from attention_residuals.page import document
from attention_residuals.trace import Trace


@pytest.fixture(scope="module")
def trace():
    return recorded(model_of(), tokens_of(6)).trace


def policy_of(text):
    found = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    return dict(rule.strip().split(" ", 1) for rule in found.split(";"))


def test_scripts_and_styles_run_by_their_hashes_only(trace):
    for live in (False, True):
        text = page.html(page.payload(trace), live=live)
        rules = policy_of(text)
        scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
        assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
        assert "unsafe" not in " ".join(rules.values())
        assert rules["default-src"] == "'none'"
        assert rules.get("connect-src") == ("'self'" if live else None)


def test_the_live_page_has_the_script_of_the_server_and_the_file_has_not(trace):
    live = files("attention_residuals.page") / "assets" / "live.js"
    texts = [page.html(page.payload(trace), live=live) for live in (False, True)]
    assert [len(re.findall(r"<script>", text)) for text in texts] == [1, 1 + live.is_file()]


def test_code_of_the_page_makes_no_markup_of_text():
    for name in document.SCRIPTS:
        code = (files("attention_residuals.page") / "assets" / name).read_text()
        code = re.sub(r"//.*", "", code)
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "fetch(",
        ):
            assert word not in code, name
        assert "http:" not in code


def test_assets_are_all_used_and_small():
    names = {one.name for one in (files("attention_residuals.page") / "assets").iterdir()}
    assert names - {"live.js"} == {*document.SCRIPTS, *document.STYLES}
    for name in (*document.SCRIPTS, *document.STYLES):
        assert len((files("attention_residuals.page") / "assets" / name).read_text().splitlines()) <= 300


def test_a_page_is_a_new_file(trace, tmp_path):
    path = tmp_path / "new" / "a.html"
    page.write(trace, path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        page.write(trace, path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["a.html"]


def test_the_same_content_gives_the_same_bytes(trace):
    assert page.html(page.payload(trace)) == page.html(page.payload(trace))


def test_a_trace_does_not_know_the_page(trace):
    assert not hasattr(Trace, "page")
    assert "iframe" not in trace._repr_html_()


class Frame(HTMLParser):
    def handle_starttag(self, tag, attributes):
        self.tag, self.attributes = tag, dict(attributes)


def test_a_notebook_shows_the_same_document_in_a_sandbox(trace):
    frame = Frame()
    frame.feed(page.notebook(trace, height=700)._repr_html_())
    assert frame.tag == "iframe"
    assert frame.attributes["srcdoc"] == page.html(page.payload(trace))
    assert frame.attributes["height"] == "700"
    assert set(frame.attributes["sandbox"].split()) == {"allow-scripts", "allow-downloads"}
    assert "src" not in frame.attributes


def test_a_notebook_shows_the_page_offline(browser, trace, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><p>cell</p>{page.notebook(trace)._repr_html_()}", encoding="utf-8")
    context = browser.new_context(offline=True)
    tab, messages = context.new_page(), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(path.as_uri())
    frame = tab.frame_locator("iframe")
    frame.locator("body[data-painted]").wait_for()
    frame.locator("#token-3").click()
    frame.locator("#map .caption", has_text="token 3").wait_for()
    assert frame.locator("#map td").count() == 9 * 5
    with tab.expect_download() as download:
        frame.locator("#map .file >> nth=2").click()
    assert download.value.suggested_filename == "map-L2.mlp-token3.csv"
    context.close()
    assert messages == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["the cat sat on the mat and the dog sat on the cat " * 20], 280)
    save_model(Decoder(presets.scaled(2, vocab_size=tokenizer.vocab_size)), made)
    tokenizer.save(made / "tokenizer.json")
    return made


def test_the_trace_command_writes_the_page_with_predictions_and_lens(folder, tmp_path, capsys):
    path = tmp_path / "trace.html"
    assert main(["trace", str(folder), "the cat", "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert '"lens":{' in text
    assert '"predictions":{' in text
    assert '"checkpoint":"' in text
    assert main(["trace", str(folder), "the cat", "--html", str(path)]) != 0
    assert "which exists" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == text


def test_a_report_shows_its_sections_and_then_the_views_of_its_trace(opened):
    section = page.Section(
        heading="Loss", paragraphs=("It fell.",), table=(("model", "loss"), ("ours", "2.1"))
    )
    content = page.PageContent(
        first=recorded(model_of(), tokens_of(6)), title="A study", lead="What was found.", sections=[section],
        about={"seed": "0"}, spell=Words().tokens,
    )  # fmt: skip
    found = opened(content)
    heads = found.tab.locator("h1, h2").all_inner_texts()
    assert heads[:5] == ["A study", "Loss", "To explore: the routing", "Text", "Where each site reads"]
    assert heads[-1] == "About this page"
    assert found.text(".report table td") == "2.1"


def test_a_report_without_a_trace_needs_no_views(browser, tmp_path):
    path = tmp_path / "report.html"
    page.write(page.PageContent(title="A study", lead="What was found."), path)
    context = browser.new_context(offline=True)
    tab, messages = context.new_page(), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(path.as_uri())
    assert tab.locator(".view").count() == 0
    tab.evaluate("AttnRes.ready")
    tab.evaluate("AttnRes.set({theme: 'dark'})")
    assert tab.locator("noscript").count() == 1
    context.close()
    assert messages == []


def test_a_page_of_a_trace_from_disk_is_the_page_of_the_trace(tmp_path):
    with torch.no_grad():
        trace = record(model_of(), tokens_of(6))
    trace.save(tmp_path / "trace")
    assert page.html(page.payload(Trace.load(tmp_path / "trace"))) == page.html(page.payload(trace))

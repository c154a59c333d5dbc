import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.page import PageContent, ReportFigure, Section, html, payload, write

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
EVIL = "<script>alert(1)</script> & \"quotes\" 'and' <b>"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Reads a page into tags with attributes and texts by tag, and fails where tags do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.append([tag, ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[-1][1] += data

    def text(self, tag):
        return [text.rstrip("\n") for name, text in self.texts if name == tag]

    def attributes(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def picture(**changes):
    return ReportFigure(**({"png": PNG, "caption": "A caption.", "alt": "A dot."} | changes))


def written(folder, sections=(), title="A run", lead="It worked.", about=None):
    path = folder / "report.html"
    path.unlink(missing_ok=True)
    write(PageContent(title=title, lead=lead, sections=sections, about={} if about is None else about), path)
    return path.read_text(encoding="utf-8")


def empty():
    return PageContent(title="a", lead="b")


def everything():
    table = (("model", "loss", EVIL), ("standard", "2.10", EVIL), (EVIL, "-2,345.5", ""))
    figure = picture(caption=EVIL, alt=EVIL)
    return Section(heading=EVIL, paragraphs=("One.", EVIL), table=table, figures=(figure, picture()))


def test_every_text_appears_letter_by_letter_and_nothing_in_it_becomes_markup(tmp_path):
    text = written(tmp_path, [everything()], title=EVIL, lead=EVIL, about={EVIL: EVIL})
    page = Page(text)
    assert page.attributes("script") == [{"type": "application/json", "id": "payload"}, {}]
    assert not page.attributes("b")
    assert page.text("title") == page.text("h1") == page.text("dt") == page.text("dd") == [EVIL]
    assert page.text("h2") == [EVIL, "About this page"]
    assert page.text("p") == [EVIL, "One.", EVIL]
    assert page.text("figcaption") == [EVIL, "A caption."]
    assert [image["alt"] for image in page.attributes("img")] == [EVIL, "A dot."]
    assert page.text("td") == ["2.10", EVIL, "-2,345.5", ""]
    assert page.text("th") == ["model", "loss", EVIL, "standard", EVIL]


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"])))
def test_any_text_comes_back_from_the_page(text):
    content = PageContent(lead="b", sections=[Section(heading="a", paragraphs=(text,))])
    page = Page(html(payload(content)))
    assert page.text("p")[1] == text


def test_what_no_file_may_hold_is_shown_by_its_number(tmp_path):
    page = Page(written(tmp_path, lead="a\x00b\ud800c\x1b[31m\nd\te"))
    assert page.text("p") == ["a\\x00b\\ud800c\\x1b[31m\nd\te"]


def test_a_page_needs_no_network_and_says_so_to_the_browser(tmp_path):
    text = written(tmp_path, [everything()], about={"torch": "2.9.1"})
    page = Page(text)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert not {"link", "iframe", "object", "a", "base", "form"} & {tag for tag, _ in page.tags}
    assert all(not name.startswith("on") and name != "style" for _, found in page.tags for name in found)
    policy = next(
        m["content"] for m in page.attributes("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind, tag in (("style-src", "style"), ("script-src", "script")):
        inline = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert rules["img-src"] == "data: blob:"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_a_page_holds_its_pictures_bit_by_bit_at_their_size_on_paper(tmp_path):
    png = PNG[:16] + (1500).to_bytes(4) + (750).to_bytes(4) + PNG[24:]
    (image,) = Page(written(tmp_path, [Section(heading="a", figures=(picture(png=png),))])).attributes("img")
    start, data = image["src"].split(",")
    assert start == "data:image/png;base64"
    assert base64.b64decode(data) == png
    assert (image["width"], image["height"]) == ("960", "480")


def test_a_page_is_for_screen_readers_phones_paper_and_the_dark(tmp_path):
    text = written(tmp_path, [everything(), Section(heading="b")], about={"seed": "0"})
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.attributes("html") == [{"lang": "en"}]
    assert page.attributes("meta")[0] == {"charset": "utf-8"}
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")] == ["h1", "h2", "h2", "h2"]
    assert [tag for tag, _ in page.tags if tag in ("main", "footer")] == ["main", "footer"]
    assert [th["scope"] for th in page.attributes("th")] == ["col"] * 3 + ["row"] * 2
    assert any(m.get("name") == "viewport" for m in page.attributes("meta"))
    (look,) = page.text("style")
    assert all(part in look for part in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem"))
    assert page.attributes("section")[0] == {"id": "live", "hidden": None}


@pytest.mark.parametrize(
    ("cell", "is_number"),
    [
        ("1", True),
        ("-2,345.5", True),
        ("\N{MINUS SIGN}3", True),
        ("12 %", True),
        ("", True),
        ("12 s", False),
        ("1e", False),
    ],
)
def test_columns_of_numbers_are_flush_right(tmp_path, cell, is_number):
    table = (("name", "value"), ("a", "1.5"), ("b", cell))
    page = Page(written(tmp_path, [Section(heading="a", table=table)]))
    assert [td.get("class") for td in page.attributes("td")] == (["number"] * 2 if is_number else [None] * 2)
    assert "class" not in page.attributes("th")[0]


def test_a_report_without_about_has_no_foot(tmp_path):
    assert not Page(written(tmp_path)).attributes("footer")


def test_an_existing_file_is_left_alone(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        write(empty(), path)
    assert path.read_text() == "mine"


def test_a_folder_is_made_and_one_that_cannot_be_is_refused(tmp_path):
    write(empty(), tmp_path / "new" / "a.html")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.html"]
    with pytest.raises(CheckpointError, match="while writing"):
        write(empty(), tmp_path / "new" / "a.html" / "b.html")


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_report_appears_complete_or_not_at_all(tmp_path, monkeypatch, step):
    seen = []

    def fails(self, *rest, **options):
        self.touch()
        seen.append((tmp_path / "report.html").exists())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, fails)
    with pytest.raises(CheckpointError, match="No space left"):
        written(tmp_path)
    assert seen == [False]
    assert not list(tmp_path.iterdir())


def test_a_picture_must_be_a_png_and_say_what_it_shows():
    with pytest.raises(ConfigError, match="PNG"):
        picture(png=b"<svg>")
    with pytest.raises(ConfigError, match="alt"):
        picture(alt=" ")


@pytest.mark.parametrize("table", [(("a", "b"),), (("a", "b"), ("c",)), ((), ())])
def test_a_table_with_gaps_or_without_rows_is_refused(table):
    with pytest.raises(ConfigError, match="'Losses'"):
        Section(heading="Losses", table=table)

"""Tokens are data: whatever they hold, however many there are."""

import json
import time
import unicodedata
from dataclasses import replace

import pytest
import torch
from page_content import Words, model_of, recorded, tokens_of

from attention_residuals import page, record

SCRIPT = "</script><script>globalThis.broken = true</script>"
STRANGE = (
    "<b>bold</b>", SCRIPT, "<img src=x onerror='globalThis.broken = true'>", "\"double\" 'single' & &amp; `back`",
    "\n", "\r\n", "\t", " ", "", "\u200b", "a\u200db", "\u05e9\u05dc\u05d5\u05dd", "\u202eabc\u202c", "\ufeff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0301", "\ud800", "\x00", "\x1b[31m", "\u2028\u2029",
    "=1+1", "long" * 500, "\u4e2d\u6587", "<!--", "\u00ad", "\u3164", "]]>", "${globalThis.broken = true}",
)  # fmt: skip


@pytest.fixture(scope="module")
def strange():
    tokens = tokens_of(len(STRANGE))
    first = recorded(model_of(), tokens, texts=(STRANGE,))

    class Spelling:
        def tokens(self, ids):
            return [STRANGE[number % len(STRANGE)] for number in ids]

    section = page.Section(heading=SCRIPT, paragraphs=(SCRIPT,))
    return page.PageContent(
        first=replace(first, name=SCRIPT), second=replace(first, name="<i>B</i>"), spell=Spelling().tokens,
        title=SCRIPT, lead=SCRIPT, sections=[section], about={SCRIPT: SCRIPT},
    )  # fmt: skip


def test_no_text_of_a_trace_becomes_markup_or_runs(opened, strange):
    found = opened(strange, "#scope=token&token=1&tint=surprise")
    for token in range(len(STRANGE)):
        found.set(token=token, measure="weight" if token % 2 else "writer")
    found.tab.hover("#token-1")
    found.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found.tab.wait_for_selector("#story .twin tbody tr")
    assert found.tab.evaluate("globalThis.broken") is None
    for tag in ("b", "i", "img"):
        assert found.tab.locator(f"body {tag}").count() == 0
    assert found.tab.locator("script").count() == 2
    assert found.text("h1") == SCRIPT
    assert found.tab.title() == SCRIPT


def test_nothing_in_the_file_ends_the_script_early(strange):
    text = page.html(page.payload(strange))
    data = text.split('<script type="application/json" id="payload">')[1].split("</script>")[0]
    assert "<" not in data
    assert data.isascii()
    assert json.loads(data)["traces"][0]["tokens"]["texts"][0] == list(STRANGE)
    assert text.count("<script") == text.count("</script>") == 2


def test_what_cannot_be_seen_is_shown(opened, strange):
    found = opened(strange)
    expected = {
        4: "\u23ce", 5: "CR\u23ce", 6: "\u21e5", 7: "\u2423", 8: "\u2205", 9: "U+200B", 10: "aU+200Db",
        12: "U+202EabcU+202C", 13: "U+FEFF", 15: "\u25cc\u0301", 16: "U+D800", 17: "U+0000", 18: "U+001B[31m",
        19: "U+2028U+2029", 24: "U+00AD", 25: "U+3164",
    }  # fmt: skip
    for token, text in expected.items():
        assert found.tab.locator(f"#token-{token} .word").inner_text() == text
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    shown = "".join(found.tab.locator("#text .word").all_inner_texts())
    assert not [letter for letter in shown if unicodedata.category(letter) in hidden]
    assert len(found.tab.locator("#token-21 .word").inner_text()) == 40


def test_a_token_of_the_other_direction_does_not_turn_its_neighbours(opened, strange):
    found = opened(strange)
    word = found.tab.locator("#token-11 .word")
    assert word.evaluate("one => [one.tagName, one.dir, getComputedStyle(one).unicodeBidi]") == [
        "BDI",
        "auto",
        "isolate",
    ]
    order = found.tab.eval_on_selector_all(
        "#token-10, #token-11, #token-12",
        "all => all.map(one => one.getBoundingClientRect()).map(one => one.top * 1e5 + one.left)",
    )
    assert order == sorted(order)


def test_a_table_file_holds_texts_as_they_are_and_nothing_that_a_spreadsheet_runs(opened, strange):
    import csv
    import io

    found = opened(strange)
    text = found.saved("text", "CSV").decode("utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == len(STRANGE)
    assert rows[1]["token"] == SCRIPT
    assert rows[4]["token"] == "'\n"  # behind a line's end, a formula would start
    assert rows[20]["token"] == "'=1+1"
    assert rows[21]["token"] == STRANGE[21]


def test_a_picture_file_of_strange_texts_is_a_picture(opened, strange):
    import xml.etree.ElementTree as ET

    found = opened(strange)
    for view in ("text", "story", "lens", "pair"):
        root = ET.fromstring(found.saved(view, "SVG").decode())
        assert {child.tag.rpartition("}")[2] for child in root.iter()} <= {
            "svg",
            "rect",
            "text",
            "polyline",
            "polygon",
        }


def test_ten_thousand_tokens_open_and_are_walked_through(opened, record_testsuite_property):
    model = model_of(depth=4, max_tokens=10_000)
    with torch.no_grad():
        trace = record(model, tokens_of(10_000))
    start = time.perf_counter()
    found = opened(page.PageContent(first=page.Recorded(trace=replace(trace, token_texts=()), name="")))
    seconds = time.perf_counter() - start
    record_testsuite_property("seconds_to_open_10000_tokens", seconds)
    print(f"10,000 tokens: {seconds:.2f} s to write and open")
    assert found.tab.evaluate("document.querySelectorAll('*').length") < 6000
    found.set(token=9_999, scope="token", row=0)
    assert found.tab.locator("#token-9999").is_visible()
    assert "9,728 to 9,999 of 10,000" in found.text(".pager")
    weight = trace["L2.mlp"].weights[:, 0, 9_999].tolist()
    found.set(site="L2.mlp")
    labels = found.tab.locator("#map tr:has(th.chosen) td:not(.none)").evaluate_all(
        "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert [float(label.rsplit(": ", 1)[1]) for label in labels] == pytest.approx(weight, rel=1e-3)
    found.painted(lambda: found.tab.click("button:text-is('Earlier')"))
    assert found.state["token"] == 9_216
    found.tab.locator("#token-9216").focus()
    found.painted(lambda: found.tab.keyboard.press("ArrowLeft"))
    assert found.tab.evaluate("document.activeElement.id") == "token-9215"
    found.tab.locator(".story").evaluate("one => { one.scrollLeft = 100000; }")
    assert found.tab.locator(".story canvas").evaluate("one => one.width") < 3000


def test_one_token_is_enough(opened):
    found = opened(page.PageContent(first=recorded(model_of(), tokens_of(1)), spell=Words().tokens))
    assert found.tab.locator("#text .token").count() == 1
    assert found.tab.locator("#lens tbody tr").count() == 9
    found.tab.locator("#token-0").focus()
    for key in ("ArrowRight", "ArrowLeft", "End", "ArrowDown"):
        found.tab.keyboard.press(key)
    assert found.state["token"] == 0
    for view in ("text", "map", "story", "profile", "lens"):
        assert found.saved(view, "PNG").startswith(b"\x89PNG")


def test_a_text_of_padding_and_special_tokens_only_has_no_averages(opened):
    model, tokens = model_of(), tokens_of(4, rows=2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 2:] = False
    first = recorded(model, tokens, mask=mask)
    trace = replace(first.trace, special=torch.tensor([[False] * 4, [True] * 4]))
    found = opened(trace, "#row=1&scope=text")
    assert found.tab.locator("#token-3.padding").count() == 1
    assert found.tab.locator("#token-0.special").count() == 1
    assert set(found.tab.locator("#map td:not(.none)").all_inner_texts()) == {"\u2013"}
    found.set(scope="token", token=3)
    assert set(found.tab.locator("#map td:not(.none)").all_inner_texts()) == {"\u2013"}

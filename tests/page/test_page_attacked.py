"""What a page does with models that differ, padding, old browsers, strange addresses and spreadsheets."""

import csv
import io
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch
from live_model import folder_of_a_model
from page_content import decoded, model_of, recorded, tokens_of

from attention_residuals import page, record
from attention_residuals.cli.main import main
from attention_residuals.errors import NonFiniteError
from attention_residuals.layers.residual import RULES


def rows_of(saved):
    return list(csv.DictReader(io.StringIO(saved.decode("utf-8"), newline="")))


@pytest.fixture(scope="module")
def single():
    return page.PageContent(first=recorded(model_of(), tokens_of(9, rows=2)))


@pytest.mark.parametrize(
    "other", [model_of(depth=5), model_of(RULES["value-query"]())], ids=["depth", "parts"]
)
def test_the_profile_of_two_models_compares_sites_and_writers_of_the_same_name(opened, other):
    first, second = record(model_of(depth=3), tokens_of(8)), record(other, tokens_of(8))
    found = opened(page.PageContent(first=first, second=second))
    rows = {row["place"]: row for row in rows_of(found.saved("profile", "CSV"))}
    names = [site.name for site in second]
    for site in first:
        told = rows[site.name]["state_norm B"]
        if site.name not in names:
            assert told == ""
        else:
            expected = second[site.name].state_norms.mean().item()
            assert float(told) == pytest.approx(expected, rel=1e-6), site.name
    for writer in first.writers:
        expected = second.writer_norms[second.writers.index(writer)].mean().item()
        assert float(rows[writer]["writer_norm B"]) == pytest.approx(expected, rel=1e-6), writer


@pytest.mark.parametrize(
    ("view", "control"),
    [
        ("map", "#map button:text-is('apart')"),
        ("map", "#map button:text-is('fitted')"),
        ("text", "#text select"),
        ("controls", ".controls button:text-is('norm share')"),
        ("lens", "#lens button:text-is('L1.mlp')"),
    ],
)
def test_the_keyboard_stays_where_it_is_when_a_control_is_made_anew(opened, single, view, control):
    found = opened(single, "#scope=token&token=0")
    found.tab.locator(control).focus()
    if control.endswith("select"):
        found.painted(lambda: found.tab.select_option(control, "entropy"))
    else:
        found.painted(lambda: found.tab.keyboard.press("Enter"))
    place = (
        "(view) => document.activeElement.matches('button, select') && !!document.activeElement.closest(view)"
    )
    assert found.tab.evaluate(place, f".{view}" if view == "controls" else f"#{view}")
    assert found.tab.locator(control).evaluate("(one) => one === document.activeElement")


def test_at_the_last_page_the_focus_goes_to_the_button_that_is_left(opened):
    found = opened(record(model_of(depth=2, max_tokens=600), tokens_of(600)), "#scope=token&token=0")
    found.tab.locator("#text button:text-is('Later')").focus()
    found.painted(lambda: found.tab.keyboard.press("Enter"))
    assert found.tab.evaluate("document.activeElement.textContent") == "Earlier"


@pytest.mark.parametrize("theme", ["zzz", "constructor", "Dark"])
def test_an_address_with_an_unknown_theme_has_that_of_the_system(opened, single, theme):
    colour = "document.querySelector('#map td[aria-selected]').style.backgroundColor"
    usual = opened(single, color_scheme="dark")
    strange = opened(single, f"#theme={theme}", color_scheme="dark")
    assert strange.tab.evaluate("document.documentElement.dataset.theme") is None
    assert strange.tab.evaluate(colour) == usual.tab.evaluate(colour)


def test_a_browser_that_cannot_unpack_says_so(browser, single, tmp_path):
    page.write(single, tmp_path / "a.html")
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.add_init_script("delete globalThis.DecompressionStream")
    tab.goto((tmp_path / "a.html").as_uri())
    tab.wait_for_selector("#views [role='alert']", timeout=60_000)
    assert "browser" in tab.inner_text("#views")
    context.close()


def test_a_page_whose_numbers_are_damaged_says_so(browser, single, tmp_path):
    found = page.payload(single)
    found["traces"][0]["arrays"]["weight"]["data"] = "AAAA"
    (tmp_path / "a.html").write_text(page.html(found))
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto((tmp_path / "a.html").as_uri())
    tab.wait_for_selector("#views [role='alert']", timeout=60_000)
    assert "cannot be shown" in tab.inner_text("#views")
    context.close()


@pytest.mark.parametrize(
    "start", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20"]
)
def test_no_text_in_a_table_file_starts_a_formula(opened, start):
    text = f"{start}1+1"
    content = recorded(model_of(depth=2), tokens_of(2), texts=((text, "b"),))
    assert rows_of(opened(content).saved("text", "CSV"))[0]["token"] == f"'{text}"


def test_no_token_in_the_file_of_a_contrast_starts_a_formula(tmp_path):
    folder = folder_of_a_model(tmp_path / "model")
    assert main(["contrast", str(folder), "=a", "=o", "--out", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "contrast.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["first"] for row in rows if row["token"] == "1"} == {"'="}
    assert all(math.isfinite(float(row["weight_second"])) for row in rows)


def test_a_picture_file_is_xml_whatever_a_pass_is_called(opened):
    one = recorded(model_of(depth=2), tokens_of(3), name="\x00\x1b\x0b\ufffe]]>&<a>")
    found = opened(page.PageContent(first=one, second=replace(one, name="b")))
    for view in ("pair", "profile", "map"):
        root = ET.fromstring(found.saved(view, "SVG").decode())
        assert root.tag.endswith("svg")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_predictions_that_are_not_finite_are_refused_before_writing(tmp_path, number):
    one = recorded(model_of(), tokens_of(6, rows=2))
    logits = one.logits.clone()
    logits[1, 3, 7] = number
    with pytest.raises(NonFiniteError, match="a predicted probability nan at token 3 of text 1"):
        page.write(replace(one, logits=logits), tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_tokens_that_a_model_can_never_predict_are_no_fault():
    one = recorded(model_of(), tokens_of(6))
    logits = one.logits.clone()
    logits[..., 9:] = -math.inf
    found = page.payload(replace(one, logits=logits))["traces"][0]["predictions"]
    assert np.isfinite(decoded(found["top_probabilities"])).all()


def test_nothing_is_told_of_predictions_at_padding_or_across_it(opened):
    tokens = tokens_of(6, rows=2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :2] = mask[1, 4:] = False
    one = recorded(model_of(), tokens, mask=mask)
    other = recorded(model_of(), (tokens + 1) % 50, mask=mask)
    logits = one.logits.masked_fill(~mask[..., None], math.nan)
    found = page.payload(page.PageContent(first=replace(one, logits=logits), second=other))
    followed = np.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=bool)
    for group in ("predictions", "lens"):
        numbers = decoded(found["traces"][0][group]["log_probabilities"])
        np.testing.assert_array_equal(np.isfinite(numbers), np.broadcast_to(followed, numbers.shape))
        chances = decoded(found["traces"][0][group]["top_probabilities"])
        real = np.broadcast_to(mask.numpy()[..., None], chances.shape)
        np.testing.assert_array_equal(np.isfinite(chances), real)
    distances = decoded(found["pair"]["divergence"])
    np.testing.assert_array_equal(np.isfinite(distances), np.broadcast_to(mask.numpy(), distances.shape))
    shown = opened(replace(one, logits=logits), "#scope=token&row=0&token=1")
    assert "NaN" not in shown.text("body")
    assert shown.tab.locator("#panel .likeliest li").count() == 0
    shown.painted(lambda: shown.tab.click("#token-2"))
    assert shown.tab.locator("#panel .likeliest li").count() == 5

"""How pages look on screens of all kinds and on paper: what can be measured of it."""

import re
from importlib.resources import files
from itertools import pairwise

import pytest
from page_content import Words, full_content, model_of, recorded, tokens_of

from attention_residuals import AttnRes, page

AUDIT = """() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, share, n) => sum + share * linear(rgb[n] / 255), 0);
  const unread = "svg, [hidden], .sr, script, noscript, button:disabled, option";
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0.99) return found.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const wrong = [];
  let count = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest(unread) || !node.checkVisibility()) continue;
    const front = parts(getComputedStyle(node).color).slice(0, 3);
    const [low, high] = [front, behind(node)].map(light).sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    count++;
    if (ratio < 4.5) wrong.push(`${node.className} ${node.textContent.slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return [count, wrong];
}"""


@pytest.fixture(scope="module")
def content():
    return full_content()


@pytest.fixture(scope="module")
def wide():
    """A model of many sources, whose maps are wider than a telephone."""
    model = model_of(AttnRes(sublayers_per_block=1), depth=8)
    return page.PageContent(first=recorded(model, tokens_of(40)), spell=Words().tokens)


def colour(found, name):
    return found.tab.evaluate(
        "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()", name
    )


def fill_of(found):
    """The colour of the map's first cell."""
    return found.tab.evaluate("getComputedStyle(document.querySelector('#map td')).backgroundColor")


def luminance(text):
    parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["content", "wide"])
@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_is_wider_than_the_screen(opened, request, which, width, scheme):
    shown = request.getfixturevalue(which)
    found = opened(shown, viewport={"width": width, "height": 800}, color_scheme=scheme)
    found.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for measure in ("weight", "writer"):
        found.set(measure=measure)
        assert found.tab.evaluate("document.documentElement.scrollWidth") == width
    outside = found.tab.eval_on_selector_all(
        ".view, .controls, .chips, .help, h1, .caption",
        "all => all.filter((one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.className)",
    )
    assert outside == []


@pytest.mark.parametrize("scale", [1, 2])
def test_drawings_are_as_sharp_as_the_screen(opened, content, scale):
    found = opened(content, device_scale_factor=scale)
    size = found.tab.eval_on_selector(
        ".story canvas", "one => [one.width, one.getBoundingClientRect().width]"
    )
    assert size[0] == pytest.approx(scale * size[1], abs=1)
    shot = found.tab.locator(".story").screenshot()
    assert int.from_bytes(shot[16:20]) == pytest.approx(scale * size[1], abs=3 * scale)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_aa(opened, content, scheme):
    found = opened(content, "#scope=token&token=5", color_scheme=scheme)
    found.tab.click("#help summary")
    for measure in ("weight", "projection_share", "effect"):
        found.set(measure=measure, tint="entropy" if measure == "effect" else "cell")
        count, wrong = found.tab.evaluate(AUDIT)
        assert count > 200
        assert wrong == []


def palette(dark):
    look = (files("attention_residuals.page") / "assets" / "look.css").read_text()
    block = re.search(r':root\[data-theme="dark"\] \{(.*?)\}' if dark else r"^:root \{(.*?)\}", look, re.S)[1]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


@pytest.mark.parametrize("dark", [False, True])
def test_the_palette_has_the_contrast_of_aa(dark):
    colours = palette(dark)
    for back in ("paper", "raised", "shade"):
        for front in ("ink", "faint", "accent", "link"):
            assert ratio(colours[front], colours[back]) >= 4.5, (front, back)
        for mark in ("first", "second", "accent"):
            assert ratio(colours[mark], colours[back]) >= 3, (mark, back)
    assert ratio(colours["ink"], colours["warn"]) >= 4.5


def test_scales_run_through_lightness_alone_so_that_no_eye_and_no_printer_loses_them():
    scales = (files("attention_residuals.page") / "assets" / "scales.js").read_text()
    for theme, falls in (("light", True), ("dark", False)):
        block = re.search(rf"{theme}: {{(.*?)}}", scales, re.S)[1]
        one, two = (re.findall(r"#[0-9a-f]{6}", line) for line in block.strip().splitlines())
        lights = [luminance(colour) for colour in one]
        assert lights == sorted(lights, reverse=falls)
        assert ratio(one[0], one[-1]) > 7
        sides = [luminance(colour) for colour in two]
        middle = len(two) // 2
        rising, falling = sorted(sides[: middle + 1]), sorted(sides[middle:], reverse=True)
        assert (sides[: middle + 1], sides[middle:]) == (
            (rising, falling) if falls else (rising[::-1], falling[::-1])
        )


def test_the_dark_is_dark_and_the_light_is_light(opened, content):
    dark = opened(content, color_scheme="dark")
    assert luminance(colour(dark, "--paper")) < 0.05
    light = opened(content, color_scheme="light")
    assert luminance(colour(light, "--paper")) > 0.9
    assert fill_of(dark) != fill_of(light)


def test_the_theme_can_be_chosen_against_the_system(opened, content):
    found = opened(content, color_scheme="light")
    found.painted(lambda: found.tab.select_option(".controls select >> nth=-1", "dark"))
    assert luminance(colour(found, "--paper")) < 0.05
    assert "theme=dark" in found.tab.evaluate("location.hash")
    again = opened(content, "#theme=light", color_scheme="dark")
    assert luminance(colour(again, "--paper")) > 0.9


def test_a_change_of_the_system_repaints(opened, content):
    found = opened(content, color_scheme="light")
    before = fill_of(found)
    found.painted(lambda: found.tab.emulate_media(color_scheme="dark"))
    assert fill_of(found) != before


def test_paper_is_white_and_without_controls(opened, content):
    found = opened(content, color_scheme="dark")
    found.painted(lambda: found.tab.emulate_media(media="print"))
    assert colour(found, "--paper") == "#ffffff"
    assert fill_of(found) == fill_of(opened(content, color_scheme="light"))
    for hidden in (".controls", ".files", "#live"):
        assert not found.tab.locator(hidden).first.is_visible()
    for view in ("text", "map", "panel", "story", "profile", "pair", "distance", "lens", "edits", "effects"):
        assert found.tab.locator(f"#{view} h2").is_visible()
    count, wrong = found.tab.evaluate(AUDIT)
    assert count > 150
    assert wrong == []
    assert found.tab.pdf(format="A4", print_background=True).startswith(b"%PDF")


def test_what_a_colour_says_is_said_without_it(opened, content):
    found = opened(content, "#scope=token&token=5")
    cells = found.tab.locator("#map td:not(.none)").all_inner_texts()
    assert all(cells)
    hatched = found.tab.locator("#map td.none")
    assert "gradient" in hatched.first.evaluate("one => getComputedStyle(one).backgroundImage")
    widths = found.tab.eval_on_selector_all(
        "#text .token",
        """all => all.map((one) => {
          const [bar, whole] = [one.lastChild, one].map((part) => part.getBoundingClientRect().width);
          return [bar / whole, one.getAttribute("aria-label")];
        })""",
    )
    numbers = [float(label.rsplit(": ", 1)[1].replace("\N{MINUS SIGN}", "-")) for _, label in widths]
    assert [share for share, _ in widths] == pytest.approx(numbers, abs=0.02)


def test_screen_readers_have_names_for_everything(opened, content):
    found = opened(content)
    roles = ("grid", "listbox", "option", "application", "group", "img")
    unnamed = found.tab.eval_on_selector_all(
        ", ".join(("button", "select", *(f"[role={role}]" for role in roles))),
        """all => all.filter((one) => !one.getAttribute("aria-label") && !one.textContent.trim() && !one.labels?.length)
          .map((one) => one.outerHTML)""",
    )
    assert unnamed == []
    assert found.tab.locator("#map [role=grid] th[scope=row]").count() == 9
    assert found.tab.locator("html").get_attribute("lang") == "en"
    levels = found.tab.eval_on_selector_all(
        "h1, h2, h3, h4", "all => all.filter(one => one.checkVisibility()).map(one => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    found.painted(lambda: found.tab.click("#token-2"))
    assert "token 2" in found.tab.locator("[role=status]").inner_text()

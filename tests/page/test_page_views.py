"""Every view in a browser: what it shows, and what it gives away as a file, are the numbers of the trace."""

import csv
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from page_content import Words, full_content, model_of, recorded, tokens_of

from attention_residuals import page
from attention_residuals.layers.residual import RULES
from attention_residuals.stats import (
    average_routing,
    edge_effects,
    norm_shares,
    pair_distance,
    projection_shares,
)
from attention_residuals.trace import source_identity

VIEWS = ("text", "map", "panel", "story", "profile", "pair", "distance", "lens", "edits", "effects")


@pytest.fixture(scope="module")
def content():
    return full_content()


@pytest.fixture(scope="module")
def single():
    return page.PageContent(first=recorded(model_of(), tokens_of(9, rows=2)), spell=Words().tokens)


def rows_of(data):
    text = data.decode()
    assert "\r\n" in text
    return list(csv.DictReader(io.StringIO(text)))


def shown(text):
    """A number as it stands on the page: with a true minus, and a dash for what is not defined."""
    return float(text.replace("\N{MINUS SIGN}", "-"))


def test_all_views_are_there_and_have_a_heading(opened, content):
    found = opened(content)
    assert found.tab.eval_on_selector_all(".view", "all => all.map(one => one.id)") == [
        "text", "map", "panel", "story", "profile", "pair", "distance", "lens", "edits", "effects",
    ]  # fmt: skip
    for view in VIEWS:
        assert found.tab.locator(f"#{view} h2").is_visible()
    assert found.text("h1") == "Without B1"


def test_a_page_of_one_trace_has_no_empty_views(opened):
    found = opened(recorded(model_of(), tokens_of(5)).trace)
    assert found.tab.eval_on_selector_all(".view", "all => all.map(one => one.id)") == [
        "text", "map", "panel", "story", "profile",
    ]  # fmt: skip
    assert found.tab.locator(".choice", has_text="Pass").count() == 0
    assert "causal effect" not in found.text(".controls")


@pytest.mark.parametrize("measure", ["weight", "norm_share", "projection_share"])
def test_the_map_of_a_token_holds_the_numbers_of_the_trace_exactly(opened, single, measure):
    found = opened(single, f"#measure={measure}&scope=token&row=1&token=4")
    trace = single.first.trace
    own = {
        "weight": lambda site: site.weights,
        "norm_share": lambda site: norm_shares(trace, site.name),
        "projection_share": lambda site: projection_shares(trace, site.name),
    }[measure]
    rows = {(row["site"], row["source"]): row["value"] for row in rows_of(found.saved("map", "CSV"))}
    assert len(rows) == sum(len(site.source_names) for site in trace)
    for site in trace:
        for name, number in zip(site.source_names, own(site)[:, 1, 4].tolist(), strict=True):
            text = rows[site.site, source_identity(name)]
            assert text == "" if np.isnan(number) else float(text) == number
            label = found.cell(site.name, source_identity(name)).get_attribute("aria-label")
            told = label.rsplit(": ", 1)[1]
            if np.isnan(number):
                assert told == "not defined"
            else:
                assert shown(told) == pytest.approx(number, rel=1e-3)


def test_averages_are_over_real_tokens_only(opened):
    model, tokens = model_of(), tokens_of(8, rows=2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 3:] = False
    first = recorded(model, tokens, mask=mask)
    found = opened(first)
    for fragment, rows in (("all", slice(None)), ("text", slice(1, 2))):
        found.set(scope=fragment, row=1)
        real = first.trace.real[rows]
        told = {(row["site"], row["source"]): row for row in rows_of(found.saved("map", "CSV"))}
        for site in first.trace:
            means = site.weights[:, rows][:, real].mean(1).tolist()
            for name, number in zip(site.source_names, means, strict=True):
                one = told[site.site, source_identity(name)]
                assert float(one["value"]) == pytest.approx(number, rel=1e-6)
                assert str(int(real.sum())) in one["tokens"]


def test_the_average_map_is_average_routing(opened, single):
    routing = average_routing(single.first.trace)
    found = opened(single)
    for site, row, is_open in zip(
        routing.sites, routing.weights.tolist(), routing.is_open.tolist(), strict=True
    ):
        for source, number, opens in zip(routing.sources, row, is_open, strict=True):
            cell = found.cell(site, source)
            classes = (cell.get_attribute("class") or "").split()
            assert ("none" in classes) == np.isnan(number)
            assert ("open" in classes) == opens
            if not np.isnan(number):
                text = cell.inner_text()
                assert shown(text) == pytest.approx(number, abs=0.0501 if "." not in text else 0.00501)


def test_open_and_finished_blocks_share_a_column(opened, single):
    found = opened(single)
    heads = found.tab.locator("#map thead th:not(.corner)").all_inner_texts()
    assert heads == ["embedding", "B1", "B2", "B3", "B4"]
    assert found.cell("L1.mlp", "B2").get_attribute("aria-label").startswith("L1.mlp reads B2 (open block): ")
    assert found.cell("L2.attention", "B2").get_attribute("aria-label").startswith("L2.attention reads B2: ")


def test_sites_can_stand_apart_by_kind(opened, single):
    found = opened(single)
    found.painted(lambda: found.tab.click("#map button:text-is('apart')"))
    assert found.tab.locator("#map h3").all_inner_texts() == ["Attention sites", "MLP sites", "Output"]
    heads = found.tab.locator("#map table").nth(1).locator("tbody th").all_inner_texts()
    assert heads == [f"L{layer}.mlp" for layer in range(4)]
    assert found.state["layout"] == "apart"


def test_causal_effects_are_those_of_the_sweep(opened, content):
    found = opened(content, "#measure=effect")
    routing = edge_effects(content.effects)
    for site, row in zip(routing.sites, routing.weights.tolist(), strict=True):
        for source, number in zip(routing.sources, row, strict=True):
            told = found.cell(site, source).get_attribute("aria-label").rsplit(": ", 1)[1]
            if np.isnan(number):
                assert told in ("not measured", "not a source here")
            else:
                assert shown(told) == pytest.approx(number, rel=1e-3, abs=1e-12)
    lines = rows_of(found.saved("effects", "CSV"))
    largest = max(content.effects, key=lambda one: one.divergence)
    assert float(lines[0]["KL, nats"]) == largest.divergence
    assert len(lines) == len(content.effects)


def test_writer_weights_have_a_column_for_each_writer(opened, single):
    found = opened(single, "#measure=writer")
    heads = found.tab.locator("#map thead th:not(.corner)").all_inner_texts()
    assert heads == [name.replace("attention", "attn") for name in single.first.trace.writers]
    found.painted(lambda: found.cell("output", "L0.mlp").click())
    trace = single.first.trace
    block = trace["output"].source_names.index("B1")
    mean = trace["output"].weights[block][trace.real].mean().item()
    told = found.tab.locator("#panel dt", has_text="Writer weights").locator("xpath=../dd").inner_text()
    assert shown(told) == pytest.approx(mean, rel=1e-3)


def test_the_panel_shows_all_numbers_of_the_cell_and_of_its_site(opened, single):
    found = opened(single, "#site=L2.mlp&source=B2&scope=token&row=0&token=3")
    names = found.tab.locator("#panel dt").all_inner_texts()
    values = dict(zip(names, found.tab.locator("#panel dd").all_inner_texts(), strict=True))
    trace = single.first.trace
    site = trace["L2.mlp"]
    place = [source_identity(name) for name in site.source_names].index("B2")
    assert shown(values["Weight"]) == pytest.approx(site.weights[place, 0, 3].item(), rel=1e-3)
    assert shown(values["State norm"]) == pytest.approx(site.state_norms[0, 3].item(), rel=1e-3)
    likeliest = single.first.logits[0, 3].softmax(-1).topk(5)
    words = found.tab.locator("#panel .likeliest .word").all_inner_texts()
    assert words == Words().tokens(likeliest.indices.tolist())
    percent = found.tab.locator("#panel .likeliest .number").first.inner_text()
    assert float(percent.rstrip(" %")) == pytest.approx(100 * likeliest.values[0].item(), abs=0.051)


def test_the_story_of_a_site_is_told_token_by_token(opened, single):
    found = opened(single, "#site=L3.attention&row=1")
    site = single.first.trace["L3.attention"]
    rows = rows_of(found.saved("story", "CSV"))
    assert [int(row["token_id"]) for row in rows] == single.first.trace.tokens[1].tolist()
    for source, name in enumerate(site.source_names):
        assert [float(row[source_identity(name)]) for row in rows] == site.weights[source, 1].tolist()
    found.tab.click("#story summary")
    found.tab.wait_for_selector("#story .twin tbody tr")
    cells = found.tab.locator("#story .twin tbody tr").nth(2).locator("td").all_inner_texts()
    assert [shown(text) for text in cells[1:]] == pytest.approx(site.weights[:, 1, 2].tolist(), rel=1e-3)


def test_tints_are_the_numbers_of_the_chosen_statistic(opened, single):
    found = opened(single, "#tint=state_norm&site=L2.mlp&row=1")
    rows = rows_of(found.saved("text", "CSV"))
    norms = single.first.trace["L2.mlp"].state_norms[1].tolist()
    assert [float(row["State norm at L2.mlp"]) for row in rows] == norms
    found.set(tint="surprise")
    rows = rows_of(found.saved("text", "CSV"))
    own = single.first.logits[1].log_softmax(-1)
    expected = [-own[place, single.first.trace.tokens[1, place + 1]].item() for place in range(8)]
    assert rows[0]["Surprise"] == ""
    assert [float(row["Surprise"]) for row in rows[1:]] == pytest.approx(expected, rel=1e-5)
    label = found.tab.locator("#token-3").get_attribute("aria-label")
    assert shown(label.rsplit(": ", 1)[1]) == pytest.approx(expected[2], rel=1e-3)


def test_the_profile_has_all_sites_and_the_same_numbers_as_a_table(opened, single):
    found = opened(single)
    rows = {row["place"]: row for row in rows_of(found.saved("profile", "CSV"))}
    trace = single.first.trace
    for site in trace:
        expected = site.state_norms[trace.real].mean().item()
        assert float(rows[site.name]["state_norm"]) == pytest.approx(expected, rel=1e-6)
    for writer, norms in zip(trace.writers, trace.writer_norms, strict=True):
        assert float(rows[writer]["writer_norm"]) == pytest.approx(norms[trace.real].mean().item(), rel=1e-6)
    assert found.tab.locator("#profile .panels > svg").count() == 6
    found.tab.click("#profile summary")
    found.tab.wait_for_selector("#profile .twin tbody tr")
    assert found.tab.locator("#profile .twin tbody tr").count() == len(rows)


def test_the_pair_shows_differences_and_what_the_control_does(opened, content):
    found = opened(content, "#scope=token&token=9")
    first, second, control = (one.trace for one in content.recorded)
    for row in rows_of(found.saved("pair", "CSV")):
        site = first[row["site"]]
        place = [source_identity(name) for name in site.source_names].index(row["source"])
        before, after, aside = (
            trace[row["site"]].weights[place, 0, 9].item() for trace in (first, second, control)
        )
        assert (float(row["clean"]), float(row["without B1"]), float(row["control"])) == (
            before,
            after,
            aside,
        )
        assert float(row["difference"]) == after - before
        assert row["within_control"] == str(int(abs(after - before) <= abs(aside - before)))
    note = found.text("#distance .quiet:not(.caption)")
    assert "clean to without B1. Hatched, and in brackets: clean to control" in note
    labels = found.tab.locator("#distance .scroll svg text").all_text_contents()
    distances = [pair_distance(first, other, "L2.mlp").divergence[0, 9].item() for other in (second, control)]
    bars = [
        [shown(text) for text in re.findall(r"[\d.e+-]+", label)] for label in labels if "(control" in label
    ]
    assert any(bar == pytest.approx(distances, rel=1e-3, abs=1e-9) for bar in bars)
    options = found.tab.locator("#text option").all_inner_texts()
    assert "change of the prediction, clean to without B1" in options
    found.tab.click("#distance summary")
    told = found.tab.locator("#distance .twin tbody tr").nth(4).locator("td").all_inner_texts()
    name = first.sites[4].name
    expected = [pair_distance(first, other, name).divergence[0, 9].item() for other in (second, control)]
    assert [shown(text) for text in told] == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert found.tab.locator("#pair td.noted").count() > 0
    assert found.tab.locator("#pair td.noted").first.inner_text().startswith("(")


def test_the_lens_shows_predictions_site_by_site(opened, single):
    found = opened(single, "#scope=token&token=2&row=1")
    lens = single.first.lens
    rows = found.tab.locator("#lens tbody tr")
    assert rows.count() == len(lens.sites)
    for number in (0, 4, len(lens.sites) - 1):
        words = rows.nth(number).locator(".word").all_inner_texts()
        assert words == Words().tokens(lens.top_tokens[number, 1, 2].tolist())
        kl = rows.nth(number).locator("td.number").first.inner_text()
        assert shown(kl) == pytest.approx(lens.divergences[number, 1, 2].item(), rel=1e-3, abs=1e-7)
    found.painted(lambda: rows.nth(3).locator("button").click())
    assert found.state["site"] == lens.sites[3]


def test_receipts_are_shown(opened, content):
    found = opened(content)
    (receipt,) = content.receipts
    cells = found.tab.locator("#edits tbody tr").first.locator("th, td").all_inner_texts()
    assert cells[0] == "Drop B1 at L2.*"
    assert (shown(cells[1]), shown(cells[2])) == (receipt.fired, receipt.tokens)
    assert shown(cells[4]) == pytest.approx(receipt.largest_weight_change, rel=1e-3)


def test_every_view_is_saved_as_png_svg_and_csv(opened, content):
    found = opened(content, "#token=5")
    for view in VIEWS:
        png = found.saved(view, "PNG")
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(png[at : at + 4]) for at in (16, 20))
        svg = ET.fromstring(found.saved(view, "SVG").decode())
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        assert (width, height) == (2 * int(svg.get("width")), 2 * int(svg.get("height"))), view
        texts = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert len(texts) > 3, view
        assert len(rows_of(found.saved(view, "CSV"))) > 0, view


def test_a_saved_picture_has_the_numbers_of_the_map(opened, single):
    found = opened(single)
    svg = ET.fromstring(found.saved("map", "SVG").decode())
    texts = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    cells = [text for text in found.tab.locator("#map td").all_inner_texts() if text]
    assert set(cells) <= set(texts)


def test_a_saved_picture_says_what_it_is_from(opened, content):
    found = opened(content, "#trace=1")
    checkpoint = content.second.trace.about.get("checkpoint")
    for view in VIEWS:
        svg = ET.fromstring(found.saved(view, "SVG").decode())
        texts = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
        count = int(content.second.trace.real.sum())
        origin = f"without B1; n = {count} tokens, padding and special tokens left out; float32"
        assert texts[-1] == origin + (f"; checkpoint {checkpoint[:12]}" if checkpoint else ""), view
    with found.tab.expect_download() as download:
        found.tab.click("#map .file:text-is('CSV')")
    assert download.value.suggested_filename.endswith("-without_B1.csv")


def test_a_saved_effect_names_the_texts_of_the_sweep_and_a_source_has_no_writer_weight(opened, content):
    found = opened(content, "#measure=effect&site=L2.mlp&source=B1")
    assert {row["tokens"] for row in rows_of(found.saved("map", "CSV"))} == {
        "mean over the texts that were swept"
    }
    rows = {row["number"]: row for row in rows_of(found.saved("panel", "CSV"))}
    assert "writer" not in rows
    assert rows["effect"]["tokens"] == "mean over the texts that were swept"
    assert "Writer weights" not in found.saved("panel", "SVG").decode()


def test_each_measure_is_explained_with_its_trap(opened, content):
    found = opened(content)
    found.tab.click("#help summary")
    for measure in ("Weight", "Norm share", "Projection share", "Causal effect", "Writer weights", "Entropy"):
        term = found.tab.locator("#help dt", has_text=re.compile(rf"^{measure}$"))
        text = term.locator("xpath=following-sibling::dd[1]").inner_text()
        assert "But: " in text
        first = text.split("But: ")[0]
        assert len(re.findall(r"[.;]\s", first + " ")) >= 1
    assert "A weight is not a cause" in found.text("#help")


def test_the_page_shows_every_rule(opened):
    found = opened(recorded(model_of(), tokens_of(6)).trace)
    for name, rule in RULES.items():
        document = page.payload(recorded(model_of(rule()), tokens_of(6)).trace)
        found.tab.evaluate("document => AttnRes.show(document)", document)
        for measure in ("weight", "norm_share", "projection_share", "writer"):
            found.set(measure=measure, scope="token", token=3)
            assert found.tab.locator("#map td:not(.none)").count() > 0, name
        assert found.tab.locator(".caution").count() == len(document["traces"][0]["cautions"]), name

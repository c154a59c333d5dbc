"""Using the page: by mouse, by keyboard alone, by its address, and by a script beside it."""

import pytest
from page_content import Words, full_content, model_of, recorded, tokens_of

from attention_residuals import page


@pytest.fixture(scope="module")
def single():
    return page.PageContent(first=recorded(model_of(), tokens_of(9, rows=2)), spell=Words().tokens)


def focused(found):
    return found.tab.evaluate("document.activeElement.getAttribute('aria-label')")


def test_a_click_on_a_cell_chooses_site_and_source_for_all_views(opened, single):
    found = opened(single)
    found.select_cell("L2.mlp", "B1")
    assert (found.state["site"], found.state["source"]) == ("L2.mlp", "B1")
    assert found.cell("L2.mlp", "B1").get_attribute("aria-selected") == "true"
    assert found.tab.locator("#map [aria-selected=true]").count() == 1
    assert "B1 in L2.mlp" in found.text("#panel")
    assert "at L2.mlp" in found.text("#story .caption")
    assert "Weight of B1 at L2.mlp" in found.text("#text .caption")
    assert "L2.mlp" in found.text("#lens tr.chosen")


def test_a_click_on_a_site_keeps_the_source(opened, single):
    found = opened(single)
    found.select_cell("L2.mlp", "B1")
    found.painted(lambda: found.tab.click("#map tbody th:text-is('output')"))
    assert (found.state["site"], found.state["source"]) == ("output", "B1")


def test_a_click_on_a_token_shows_its_numbers_and_shift_makes_a_span(opened, single):
    found = opened(single)
    found.painted(lambda: found.tab.click("#token-2"))
    assert (found.state["token"], found.state["end"], found.state["scope"]) == (2, None, "token")
    assert "token 2" in found.text("#map .caption")
    found.painted(lambda: found.tab.click("#token-5", modifiers=["Shift"]))
    assert found.tab.locator("#text [aria-selected=true]").count() == 4
    assert "mean of 4 tokens of the chosen span" in found.text("#map .caption")
    found.painted(lambda: found.tab.click("#token-1"))
    assert found.tab.locator("#text [aria-selected=true]").count() == 1


def test_hovering_a_token_shows_what_the_site_reads_there(opened, single):
    found = opened(single, "#site=output&source=B1&row=0")
    found.tab.hover("#token-3")
    card = found.tab.locator("#card")
    assert card.is_visible()
    weights = single.first.trace["output"].weights[:, 0, 3].tolist()
    told = [float(text) for text in card.locator(".bars .number").all_inner_texts()]
    assert told == pytest.approx(weights, rel=1e-3)
    found.tab.keyboard.press("Escape")
    assert not card.is_visible()
    found.tab.hover("#token-4")
    found.tab.hover("h1")
    assert not card.is_visible()


def test_the_keyboard_walks_the_map(opened, single):
    found = opened(single, "#site=L1.mlp&source=B1")
    found.tab.locator("#map [tabindex='0']").focus()
    assert focused(found).startswith("L1.mlp reads B1")
    steps = {
        "ArrowDown": "L2.attention reads B1",
        "ArrowRight": "L2.attention reads B2",
        "Home": "L2.attention reads embedding",
        "End": "L2.attention reads B4",
        "ArrowUp": "L1.mlp reads B4",
        "PageDown": "output reads B4",
        "ArrowLeft": "output reads B3",
    }
    for key, label in steps.items():
        found.painted(lambda key=key: found.tab.keyboard.press(key))
        assert focused(found).startswith(label), key
    assert (found.state["site"], found.state["source"]) == ("output", "B3")
    assert found.tab.locator("#map [tabindex='0']").count() == 1


def test_the_keyboard_walks_the_text(opened, single):
    found = opened(single, "#token=2")
    found.tab.locator("#text .token[tabindex='0']").focus()
    for key, token in (("ArrowRight", 3), ("ArrowLeft", 2), ("End", 8), ("Home", 0)):
        found.painted(lambda key=key: found.tab.keyboard.press(key))
        assert found.state["token"] == token
        assert focused(found).startswith(f"token {token},")
    found.painted(lambda: found.tab.keyboard.press("Shift+ArrowRight"))
    found.painted(lambda: found.tab.keyboard.press("Shift+ArrowRight"))
    assert (found.state["token"], found.state["end"]) == (2, 0)
    found.painted(lambda: found.tab.keyboard.press("Escape"))
    assert found.state["end"] is None


def test_the_keyboard_moves_between_lines_of_the_text(opened, single):
    texts = (("ab", "\n", "cd", "ef", "\n", "gh", "ij", "kl", "mn"),) * 2
    found = opened(recorded(model_of(), tokens_of(9, rows=2), texts=texts).trace, "#token=3")
    found.tab.locator("#text .token[tabindex='0']").focus()
    found.painted(lambda: found.tab.keyboard.press("ArrowDown"))
    assert found.state["token"] == 6
    found.painted(lambda: found.tab.keyboard.press("ArrowUp"))
    found.painted(lambda: found.tab.keyboard.press("ArrowUp"))
    assert found.state["token"] in (0, 1)


def test_the_keyboard_walks_the_story(opened, single):
    found = opened(single, "#site=output&source=B2&token=4&row=0")
    found.tab.locator("#story .story").focus()
    for key, expected in (
        ("ArrowRight", {"token": 5}),
        ("ArrowDown", {"source": "B3"}),
        ("Home", {"token": 0}),
        ("ArrowUp", {"source": "B2"}),
    ):
        found.painted(lambda key=key: found.tab.keyboard.press(key))
        assert expected.items() <= found.state.items()
    weight = single.first.trace["output"].weights[2, 0, 0].item()
    assert f"{weight:.3g}"[:4] in focused(found)


def test_a_click_on_the_story_chooses_token_and_source(opened, single):
    found = opened(single, "#site=output&row=0")
    found.tab.locator("#story .story canvas").scroll_into_view_if_needed()
    box = found.tab.locator("#story .story canvas").bounding_box()
    found.painted(lambda: found.tab.mouse.click(box["x"] + 120 + 26 * 3, box["y"] + 96 + 22 * 2 + 10))
    assert found.state["source"] == "B2"
    first = found.state["token"]
    found.painted(lambda: found.tab.mouse.click(box["x"] + 120 + 26 * 5, box["y"] + 96 + 10))
    assert (found.state["source"], found.state["token"]) == ("embedding", first + 2)


def test_everything_is_reached_by_tab_alone(opened):
    found = opened(full_content())
    reached = set()
    for _ in range(120):
        found.tab.keyboard.press("Tab")
        where = found.tab.evaluate(
            "(() => { const view = document.activeElement.closest('.view, .controls, .help');"
            " return view ? view.id || view.className : ''; })()"
        )
        reached.add(where)
        if where == "effects":
            break
        outline = found.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert where == "" or outline != "none"
    views = {"text", "map", "panel", "story", "profile", "pair", "distance", "lens", "edits", "effects"}
    assert views | {"help", "controls bar"} <= reached


def test_the_address_keeps_the_view(opened, single):
    found = opened(single)
    found.select_cell("L3.attention", "B2")
    found.painted(lambda: found.tab.click("#token-5"))
    found.painted(lambda: found.tab.click(".controls button:text-is('norm share')"))
    found.painted(lambda: found.tab.select_option(".controls select >> nth=0", "1"))
    address, state = found.tab.evaluate("location.hash"), found.state
    assert state["row"] == 1
    again = opened(single, address)
    assert again.state == state
    assert "Norm share" in again.text("#map .caption")


def test_back_and_forward_walk_through_what_was_chosen(opened, single):
    found = opened(single)
    found.select_cell("L1.mlp", "B1")
    found.select_cell("L2.mlp", "B2")
    found.painted(found.tab.go_back)
    assert (found.state["site"], found.state["source"]) == ("L1.mlp", "B1")
    assert "B1 in L1.mlp" in found.text("#panel")
    found.painted(found.tab.go_forward)
    assert (found.state["site"], found.state["source"]) == ("L2.mlp", "B2")


def test_walking_by_keys_leaves_one_step_for_the_back_button(opened, single):
    found = opened(single)
    found.select_cell("L1.mlp", "B1")
    before = found.tab.evaluate("history.length")
    for _ in range(3):
        found.painted(lambda: found.tab.keyboard.press("ArrowDown"))
    found.tab.wait_for_timeout(300)
    assert found.tab.evaluate("history.length") == before
    assert found.tab.evaluate("location.hash").count("site=L3.attention") == 1


@pytest.mark.parametrize(
    "fragment",
    [
        "#site=nowhere&source=B99&token=999&row=7&trace=4&measure=lies&tint=x&scope=y&layout=z&end=88",
        "#token=-1&row=1e3&constructor=1&__proto__=2",
        "#%E0%A4%A&&&=",
        "#token=&site=%3Cscript%3Ealert(1)%3C/script%3E&theme=<img src=x onerror=alert(1)>",
    ],
)
def test_an_address_that_says_nonsense_shows_the_page_as_it_opens(opened, single, fragment):
    usual = opened(single).state
    assert opened(single, fragment).state == usual


def test_a_script_beside_the_page_hears_of_choices_and_adds_actions(opened, single):
    found = opened(single)
    found.tab.evaluate(
        """() => {
          globalThis.heard = []; globalThis.ran = [];
          AttnRes.on("select", (detail) => heard.push(detail));
          AttnRes.on("show", () => heard.push("show"));
          AttnRes.cellActions(({source, site, token}) => [
            {label: `drop ${source} at ${site}`, run: () => ran.push(token)},
          ]);
        }"""
    )
    found.painted(lambda: found.tab.click("#token-4"))
    found.select_cell("L2.mlp", "B1")
    assert found.tab.evaluate("heard.at(-1)") == {
        "trace": 0, "row": 0, "site": "L2.mlp", "source": "B1", "token": 4,
    }  # fmt: skip
    found.tab.click("#panel .actions button:text-is('drop B1 at L2.mlp')")
    assert found.tab.evaluate("ran") == [4]


def test_a_new_document_is_shown_in_place_and_what_still_applies_stays_chosen(opened, single):
    found = opened(single)
    found.select_cell("L2.mlp", "B1")
    found.painted(lambda: found.tab.click("#token-7"))
    found.tab.evaluate("AttnRes.on('show', (detail) => document.title = JSON.stringify(detail))")
    document = page.payload(recorded(model_of(), tokens_of(5, seed=3)))
    found.tab.evaluate("document => AttnRes.show(document)", document)
    assert (found.state["site"], found.state["source"], found.state["token"]) == ("L2.mlp", "B1", 4)
    assert found.tab.locator("#text .token").count() == 5
    assert found.tab.evaluate("AttnRes.payload.traces[0].tokens.ids[0].length") == 5
    assert '"site":"L2.mlp"' in found.tab.title()
    assert found.tab.locator("#live").is_hidden()


def test_a_document_of_another_format_is_refused(opened, single):
    found = opened(single)
    with pytest.raises(Exception, match="this page shows format 1"):
        found.tab.evaluate("AttnRes.show({...AttnRes.payload, format: 2})")


def test_the_chosen_pass_is_the_one_that_is_shown(opened):
    content = full_content()
    found = opened(content, "#scope=token&token=9&site=L2.mlp&source=embedding")
    for number, one in enumerate(content.recorded):
        found.set(trace=number)
        told = found.cell("L2.mlp", "embedding").get_attribute("aria-label").rsplit(": ", 1)[1]
        assert float(told) == pytest.approx(one.trace["L2.mlp"].weights[0, 0, 9].item(), rel=1e-3)


def test_colours_can_be_fitted_and_say_so_in_the_legend(opened, single):
    found = opened(single)
    assert found.text("#map .legend").startswith("0\n1 share")
    found.painted(lambda: found.tab.click("#map button:text-is('fitted')"))
    top = float(found.tab.locator("#map .legend span").nth(1).inner_text().split()[0])
    means = [
        site.weights.flatten(1).mean(1).max().item() for site in single.first.trace if len(site.weights) > 1
    ]
    assert top == pytest.approx(max(means), rel=1e-3)

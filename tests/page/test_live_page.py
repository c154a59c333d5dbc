"""The live page in a real browser: type, run, drop, force, generate, compare, cancel, and what goes wrong."""

import re
import threading

import pytest
from page.live_model import session, tiny

from attention_residuals.inference import Engine
from attention_residuals.page.jobs import Jobs
from attention_residuals.page.server import Server, application, listener
from attention_residuals.page.session import Session

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=60_000)  # as all else here: a busy machine is slow, not wrong
SECRET = "a-Secret_0"


class Pausing(Session):
    """A session whose generations wait for a word before each token."""

    def __init__(self):
        super().__init__(Engine(*tiny()), "tiny")
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def work(self, kind, fields):
        work = super().work(kind, fields)
        return work if kind != "generate" else self._paused(work)

    def _paused(self, work):
        def run(check):
            for number, event in enumerate(work(check)):
                while number == 2 and not self.may_go_on.wait(0.001):
                    check()
                yield event

        return run


@pytest.fixture(scope="module")
def served():
    found, jobs = Pausing(), Jobs()
    with listener("127.0.0.1", 0) as bound:
        server = Server(application(found, jobs, secret=SECRET), jobs)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        found.url = f"http://127.0.0.1:{bound.getsockname()[1]}/{SECRET}/"
        yield found
        server.should_exit = True
        thread.join()


@pytest.fixture
def page(browser, served):
    """The page, which must say nothing in its console and reach nothing but its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.set_default_timeout(60_000)
    complaints, asked = [], []
    found.on("console", lambda message: complaints.append(message.text))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda request: asked.append(request.url))
    found.goto(served.url)
    expect(found.get_by_role("heading", name="Ask tiny")).to_be_visible()
    found.complaints = complaints
    yield found
    served.may_go_on.set()
    context.close()
    expected = [text for text in complaints if "status of 400" not in text and "INCOMPLETE" not in text]
    assert expected == []
    assert asked
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "blob:", "data:"))] == []


def text_box(page):
    return page.get_by_role("textbox", name="Text", exact=True)


def type_text(page, text):
    text_box(page).fill(text)


def run(page, text):
    type_text(page, text)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(status(page)).to_contain_text("Done in")


def status(page):
    return page.locator("#live").get_by_role("status")


def tokens_shown(page):
    return page.evaluate("AttnRes.payload.traces[0].tokens.texts[0]")


def select(page, **state):
    page.evaluate("(state) => AttnRes.set(state)", state)


def change(page, verb, at):
    page.get_by_role("button", name=re.compile(f"^{verb} .* at {at}$")).click()
    expect(page.locator("#live li")).to_contain_text("fired once")


def readable(text):
    here = session()
    return here.tokenizer.tokens([here.tokenizer.end_of_text, *here.tokenizer.encode(text)])


def test_the_first_view_is_there_at_once(page):
    expect(text_box(page)).to_have_value(session().example)
    assert tokens_shown(page) == readable(session().example)
    expect(page.get_by_text("At most 63 tokens")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()


def test_a_text_runs_on_a_button_on_ctrl_enter_and_when_typing_stops(page):
    run(page, "the cat")
    assert tokens_shown(page) == readable("the cat")
    box = text_box(page)
    box.fill("the dog")
    box.press("Control+Enter")
    page.wait_for_timeout(50)
    expect(status(page)).to_contain_text("Done in")
    assert tokens_shown(page) == readable("the dog")
    box.press_sequentially(" sat")
    expect(page.locator("#live").get_by_text("Done in")).to_be_visible()
    page.wait_for_selector(f"text={readable('the dog sat')[-1]}")
    assert box.evaluate("(box) => box === document.activeElement")
    assert tokens_shown(page) == readable("the dog sat")


def test_a_cell_is_clicked_and_its_source_dropped_and_the_prediction_changes(page, served):
    run(page, "the cat sat")
    page.get_by_role("gridcell", name=re.compile("^L2.mlp reads B1:")).click()
    page.get_by_role("button", name="Drop B1 at L2.mlp, all tokens").click()
    expect(page.locator("#live li")).to_contain_text("Drop B1 at L2.mlp, all tokens")
    expect(page.locator("#live li")).to_contain_text("fired once")
    drop = [{"type": "Drop", "sites": "L2.mlp", "sources": "B1"}]
    (expected,) = served.work("trace", {"text": "the cat sat", "edits": drop})(lambda: None)
    rows = page.locator("#live tbody tr")
    for place in range(5):
        (before, old), (after, new) = expected["before"][-1][place], expected["after"][-1][place]
        cells = rows.nth(place).locator("td").all_text_contents()
        assert cells[::2] == [before, after]
        assert cells[1::2] == [f"{100 * old:.1f} %", f"{100 * new:.1f} %"]
    expect(page.locator("#live .changed")).to_contain_text(f"{expected['kl'][-1]:.3f} nats apart (KL)")
    assert page.evaluate("AttnRes.payload.traces.map((one) => one.name)") == ["as it is", "with edits"]
    page.locator("#live").get_by_role("button", name=re.compile("^Largest:")).click()
    most = max(range(len(expected["kl"])), key=expected["kl"].__getitem__)
    expect(page.locator("#live .changed")).to_contain_text(f"{expected['kl'][most]:.3f} nats")
    assert page.evaluate("AttnRes.state.token") == most


def test_a_source_is_forced_at_one_token(page):
    run(page, "the cat sat on")
    select(page, site="L1.mlp", source="embedding", token=2, scope="token")
    change(page, "Force", "L1.mlp, token 2")
    expect(page.locator("#live li")).to_contain_text("Force L1.mlp, token 2: read embedding alone")
    expect(page.locator("#live li")).to_contain_text("at 1 token")
    assert page.evaluate("AttnRes.payload.receipts.length") == 1


def test_a_writer_is_removed_where_writers_are_shown(page):
    run(page, "the cat sat")
    select(page, measure="writer", site="L2.mlp", source="L0.mlp")
    page.get_by_role("button", name="Remove L0.mlp at L2.mlp, all tokens").click()
    expect(page.locator("#live li")).to_contain_text("fired once")


def test_edits_are_removed_one_by_one_and_all(page):
    run(page, "the cat sat")
    for site in ("L1.mlp", "L2.mlp"):
        select(page, site=site, source="B1")
        page.get_by_role("button", name=f"Drop B1 at {site}, all tokens").click()
        expect(page.locator("#live li").filter(has_text=site)).to_contain_text("fired once")
    page.get_by_role("button", name="Remove the edit: Drop B1 at L1.mlp, all tokens").click()
    expect(page.locator("#live li")).to_have_count(1)
    expect(page.locator("#live li")).to_contain_text("L2.mlp")
    expect(page.locator("#live .changed")).to_be_visible()
    page.get_by_role("button", name="Remove all edits").click()
    expect(page.locator("#live .changed")).to_be_hidden()
    expect(page.get_by_text("No edits yet")).to_be_visible()
    assert page.evaluate("AttnRes.payload.traces.length") == 1


def test_an_edit_that_never_fires_says_so(page):
    run(page, "the cat sat on the mat")
    last = len(readable("the cat sat on the mat")) - 1
    select(page, site="L2.mlp", source="B1", token=last, scope="token")
    change(page, "Drop", f"L2.mlp, token {last}")
    type_text(page, "the")
    expect(page.get_by_role("alert")).to_contain_text("which never fired")
    expect(page.get_by_role("alert")).to_contain_text("Do: look at its positions")
    page.get_by_role("button", name="Remove all edits").click()
    expect(status(page)).to_contain_text("Done in")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert tokens_shown(page) == readable("the")


def test_text_is_generated_as_it_comes_and_taken_on(page, served):
    served.may_go_on.clear()
    type_text(page, "the cat")
    page.get_by_label("New tokens").fill("4")
    page.get_by_role("button", name="Generate").click()
    said = page.get_by_role("log")
    expect(status(page)).to_contain_text("Generating")
    *pieces, _ = list(
        Session.work(served, "generate", {"text": "the cat", "max_new_tokens": 4})(lambda: None)
    )
    expect(said).to_have_text(
        "the cat" + "".join(piece["text"] for piece in pieces[:2]), use_inner_text=False
    )
    served.may_go_on.set()
    expect(status(page)).to_contain_text("Done in")
    whole = "the cat" + "".join(piece["text"] for piece in pieces)
    assert said.text_content() == whole
    assert len(tokens_shown(page)) == len(readable("the cat")) + 4
    page.get_by_role("button", name="Take this as the text").click()
    expect(text_box(page)).to_have_value(whole)
    expect(said).to_be_hidden()


def test_what_was_generated_is_gone_when_another_text_is_typed(page):
    run(page, "the cat")
    page.get_by_role("button", name="Generate").click()
    expect(status(page)).to_contain_text("Done in")
    said = page.get_by_role("log")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(status(page)).to_contain_text("Done in")
    expect(said).to_be_visible()  # the same text: what it continues is still there
    run(page, "the dog")
    expect(said).to_be_hidden()


def test_a_generation_is_cancelled(page, served):
    served.may_go_on.clear()
    page.get_by_role("button", name="Generate").click()
    expect(status(page)).to_contain_text("Generating")
    page.get_by_role("button", name="Cancel").click()
    expect(status(page)).to_have_text("Cancelled.")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    run(page, "the dog")
    assert tokens_shown(page) == readable("the dog")


def test_what_waits_sees_its_place_and_a_newer_run_ends_the_one_before(page, served, browser):
    served.may_go_on.clear()
    page.get_by_role("button", name="Generate").click()
    expect(status(page)).to_contain_text("Generating")
    second = browser.new_context().new_page()
    second.goto(served.url)
    expect(second.get_by_role("heading", name="Ask tiny")).to_be_visible()
    type_text(second, "the dog")
    second.get_by_role("button", name="Run", exact=True).click()
    expect(status(second)).to_have_text("Waiting: 1 before this one.")
    page.get_by_role("button", name="Run", exact=True).click()  # the generation is wanted no more
    expect(status(second)).to_contain_text("Done in")
    expect(status(page)).to_contain_text("Done in")
    second.context.close()


def test_two_texts_are_compared_and_what_does_not_align_is_explained(page):
    type_text(page, "the cat sat")
    page.get_by_text("Compare with another text").click()
    other = page.get_by_label("Other text, of as many tokens")
    other.fill("the cat")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("alert")).to_contain_text("each token has its partner")
    other.fill("the dog sat")
    other.press("Control+Enter")
    expect(status(page)).to_contain_text("Done in")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.evaluate("AttnRes.payload.pair.aligned")
    expect(page.locator("#live thead")).to_have_text("textother text")
    assert page.locator("#pair h3").all_inner_texts() == ["text", "other text", "other text less text"]


def test_errors_of_the_server_are_shown(page):
    type_text(page, "")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Do: type something")
    page.route("**/trace", lambda route: route.abort())
    type_text(page, "the cat")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("start it again")
    page.complaints[:] = [text for text in page.complaints if "net::ERR_FAILED" not in text]
    page.unroute("**/trace")
    run(page, "the cat")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_what_was_typed_and_edited_survives_a_reload_and_is_not_in_the_address(page):
    run(page, "the cat sat")
    select(page, site="L2.mlp", source="B1")
    change(page, "Drop", "L2.mlp, all tokens")
    assert "cat" not in page.url
    page.reload()
    expect(text_box(page)).to_have_value("the cat sat")
    expect(page.locator("#live li")).to_contain_text("fired once")
    assert page.evaluate("AttnRes.state.site") == "L2.mlp"


def test_text_is_never_markup(page):
    text = "<img src=x onerror=alert(1)></script><b>\u202eabc"
    run(page, text)
    assert page.evaluate("AttnRes.payload.traces[0].tokens.texts[0].join('')").startswith("<|endoftext|>")
    assert page.locator("#live img, #live b").count() == 0
    page.get_by_label("New tokens").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("button", name="Take this as the text")).to_be_visible()
    assert page.get_by_role("log").text_content().startswith(text)
    assert page.locator("#live img, #live b").count() == 0


def test_everything_is_reached_and_named_for_the_keyboard(page):
    select(page, site="L2.mlp", source="B1")
    drop = page.get_by_role("button", name="Drop B1 at L2.mlp, all tokens")
    drop.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#live li")).to_contain_text("fired once")
    expect(page.get_by_role("heading", name="Edits", exact=True)).to_be_focused()
    text_box(page).focus()
    names, focused = [], page.locator(":focus")
    for _ in range(7):
        page.keyboard.press("Tab")
        names.append(focused.evaluate("(one) => one.labels?.[0]?.textContent || one.textContent"))
    assert names == [
        "Run",
        "Generate",
        "New tokens",
        "Temperature",
        "Seed",
        "Compare with another text",
        names[-1],
    ]
    assert names[-1].startswith("Remove")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1600, "light")])
def test_nothing_sticks_out_at_any_width(page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    select(page, site="L2.mlp", source="B1")
    change(page, "Drop", "L2.mlp, all tokens")
    page.get_by_text("Compare with another text").click()
    page.get_by_label("New tokens").fill("3")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("button", name="Take this as the text")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#live").bounding_box()
    for element in page.locator("#live button:visible, #live textarea:visible, #live input:visible").all():
        own = element.bounding_box()
        assert own["x"] >= box["x"] - 1
        assert own["x"] + own["width"] <= box["x"] + box["width"] + 1

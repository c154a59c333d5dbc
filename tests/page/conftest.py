"""One headless Chromium for all tests of pages; each test has a context of its own, without a network."""

import os
import re
import shutil
from pathlib import Path

import pytest

from attention_residuals import page as pages

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium():
    named = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return named or next(filter(None, found), None)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield running
        running.close()


class Opened:
    """A page in the browser, with what a test asks of it."""

    def __init__(self, tab, path):
        self.tab, self.path = tab, path
        self.messages, self.requests = [], []
        tab.on("console", lambda message: self.messages.append(message.text))
        tab.on("pageerror", lambda error: self.messages.append(str(error)))
        tab.on("request", lambda request: self.requests.append(request.url))

    def go(self, fragment=""):
        self.tab.goto(f"{self.path.as_uri()}{fragment}")
        self.tab.wait_for_selector("body[data-painted]")
        return self

    def painted(self, act):
        """Acts, and waits until the page has drawn itself again."""
        before = self.tab.evaluate("document.body.dataset.painted")
        act()
        self.tab.wait_for_selector(f'body:not([data-painted="{before}"])')

    def set(self, **changes):
        self.tab.evaluate("changes => AttnRes.set(changes)", changes)

    @property
    def state(self):
        return self.tab.evaluate("({...AttnRes.state})")

    def text(self, selector):
        return self.tab.inner_text(selector)

    def saved(self, view, kind):
        with self.tab.expect_download() as download:
            self.tab.click(f"#{view} .file:text-is('{kind}')")
        self.tab.wait_for_timeout(150)  # Chromium drops what is more than ten files a second
        return Path(download.value.path()).read_bytes()

    def cell(self, site, source):
        """The cell of the map, as an element."""
        label = re.escape(f"{site} reads {source}")
        return self.tab.locator("#map td", has=self.tab.locator("xpath=self::td")).and_(
            self.tab.get_by_label(re.compile(rf"^{label}( \(open block\))?:"))
        )

    def select_cell(self, site, source):
        self.painted(lambda: self.cell(site, source).click())


@pytest.fixture
def opened(browser, tmp_path):
    """Opens content in a tab; nothing may be asked of a network, and nothing said on the console."""
    made = []

    def open_page(content, fragment="", **options):
        path = tmp_path / f"page{len(made)}.html"
        pages.write(content, path)
        context = browser.new_context(
            offline=True, **{"viewport": {"width": 1200, "height": 900}, "accept_downloads": True, **options}
        )
        context.set_default_timeout(60_000)  # a busy machine is slow, not wrong
        shown = Opened(context.new_page(), path)
        made.append((context, shown))
        return shown.go(fragment)

    yield open_page
    for context, shown in made:
        own = shown.path.as_uri()
        outside = [url for url in shown.requests if not url.startswith((own, "blob:", "data:"))]
        context.close()
        assert outside == []
        assert shown.messages == []

"""The demo as people use it, in headless Chromium: type, read along, stop, compare, leave, two at once."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator

import pytest
from engine.hooks import WAIT_SECONDS, at_rest, runs, used_blocks

pytest.importorskip("gradio", reason="needs the extra hfpaged[demo]")
demo = pytest.importorskip("hfpaged.demo.page")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TIMEOUT_MS = WAIT_SECONDS * 1000


@pytest.fixture(scope="module")
def address(shared_host) -> Iterator[str]:
    page = demo.build_page(shared_host)
    demo.launch(page, "127.0.0.1", None, prevent_thread_lock=True, quiet=True)
    yield page.local_url
    page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """One visitor's window, with a conversation that is not sampled."""

    def __init__(self, browser, address, width=1440, height=900, scheme="light"):
        self._context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", self._note_request)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._address = address
        self.page.goto(address)
        self.page.wait_for_selector(".hp-map")

    def _note_request(self, request):
        if not request.url.startswith((self._address, "data:", "blob:")):
            self.foreign.append(request.url)

    def settle(self, temperature="0", new_tokens="40"):
        self.page.click("text=Sampling and instructions")
        for label, value in (("Temperature", temperature), ("New tokens", new_tokens), ("Repetition penalty", "1")):
            self.page.get_by_label(f"number input for {label}").first.fill(value)
            self.page.get_by_label(f"number input for {label}").first.press("Tab")
        return self

    def ask(self, question):
        self.page.fill("#message textarea", question)
        self.page.press("#message textarea", "Enter")

    def answer(self):
        bubbles = self.page.query_selector_all("#chat .bot.message")
        return bubbles[-1].inner_text() if bubbles else ""

    def wait_for_status(self, text):
        self.page.wait_for_selector(f".hp-status:has-text('{text}')")

    def wait_for_answer_longer_than(self, length):
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if len(self.answer()) > length:
                return self.answer()
            time.sleep(0.02)
        raise AssertionError(f"no answer longer than {length}: {self.answer()!r}")

    def close(self):
        self._context.close()


@pytest.fixture
def tab(browser, address) -> Iterator[Tab]:
    tab = Tab(browser, address)
    yield tab
    assert tab.foreign == [] and tab.errors == []
    tab.close()


def slow(run, *args):
    time.sleep(0.02)
    return run(*args)


def words(text):
    """A text as markdown would leave it: no white space to tell apart."""
    return re.sub(r"\s+", "", text)


def test_an_answer_streams_in_and_is_what_stock_gives(tab, host, stock_answer):
    tab.settle()
    with runs(host.engine, slow):
        tab.ask("Why?")
        first = tab.wait_for_answer_longer_than(2)
        tab.wait_for_answer_longer_than(len(first))
        tab.wait_for_status("tokens/s")
    tab.page.wait_for_selector("#message .submit-button")
    assert words(tab.answer()) == words(stock_answer("Why?", 40))


def test_stop_frees_the_blocks_and_keeps_the_text(tab, host):
    tab.settle(new_tokens="240")
    with runs(host.engine, slow):
        tab.ask("Go on")
        tab.wait_for_answer_longer_than(5)
        assert used_blocks(host.engine) > 0
        held = tab.page.wait_for_selector(".hp-map .held")
        assert held is not None
        tab.page.click("#message .stop-button")
        tab.wait_for_status("stopped, its blocks are free")
        assert used_blocks(host.engine) == 0
    assert 5 < len(tab.answer()) < 240
    tab.page.wait_for_selector(".hp-none:has-text('Nothing runs')")


def test_two_browsers_share_the_batch_and_never_the_text(tab, browser, address, host, stock_answer):
    other = Tab(browser, address, width=390, height=844, scheme="dark")
    questions = {tab: "Is canary one here?", other: "Or is it two?"}
    for one in questions:
        one.settle()
    most = 0
    with runs(host.engine, slow):
        for one, question in questions.items():
            one.ask(question)
        deadline = time.monotonic() + WAIT_SECONDS
        while most < 2 and time.monotonic() < deadline:
            most = max(most, host.engine.stats()["running"])
            time.sleep(0.01)
    for one, question in questions.items():
        one.page.wait_for_selector("#message .submit-button")
        assert words(one.answer()) == words(stock_answer(question, 40))
    assert most == 2
    other.close()


def test_a_closed_tab_frees_its_blocks(browser, address, host):
    tab = Tab(browser, address).settle(new_tokens="240")
    with runs(host.engine, slow):
        tab.ask("Go on")
        tab.wait_for_answer_longer_than(5)
        assert used_blocks(host.engine) > 0
        tab.close()
        deadline = time.monotonic() + 3
        while used_blocks(host.engine) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert used_blocks(host.engine) == 0
    assert at_rest(host.engine)


def test_the_comparison_ticks_equal_texts(tab):
    tab.page.click("button[role=tab]:has-text('Compare')")
    tab.page.fill("#shared textarea", "Rules of the boathouse.")
    tab.page.fill("#prompts textarea", "Which boats?\nWhy not?")
    tab.page.click("#compare")
    tab.page.wait_for_selector("text=2 of 2 texts are equal")
    assert len(tab.page.query_selector_all(".hp-tick.equal")) == 2


def test_a_refused_message_says_why_and_comes_back(tab, host):
    tab.settle(new_tokens="8")
    question = "x" * 600  # longer than the model reads
    tab.ask(question)
    tab.page.wait_for_selector("text=together they may be 512 at most")
    assert tab.page.input_value("#message textarea") == question


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_nothing_is_wider_than_the_screen(browser, address, width, height):
    tab = Tab(browser, address, width, height)
    for name in ("Chat", "Compare"):
        tab.page.click(f"button[role=tab]:has-text('{name}')")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()

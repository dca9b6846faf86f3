"""The page as Gradio sees it: no browser needed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from families import build_tiny
from tiny_chat import chat_tokenizer

from hfpaged.demo.host import Host
from hfpaged.errors import AlreadyPatchedError, InputError

pytest.importorskip("gradio", reason="needs the extra hfpaged[demo]")
build_page = pytest.importorskip("hfpaged.demo.page").build_page
failure_of = pytest.importorskip("hfpaged.demo.failure").failure_of
theme = pytest.importorskip("hfpaged.demo.theme")


def events(page, trigger):
    """The event handlers of a page with such a trigger."""
    return [fn for fn in page.fns.values() if any(target[1] == trigger for target in fn.targets)]


def test_as_many_answers_at_once_as_the_engine_takes(host):
    page = build_page(host)
    (submit,) = events(page, "submit")
    assert submit.concurrency_limit == host.max_users == 8
    assert page.analytics_enabled is False


def test_a_closed_tab_stops_what_it_has_running(host):
    (unload,) = events(build_page(host), "unload")

    class Request:
        session_hash = "tab"

    with host.visitors.serving("tab") as scope, host.visitors.serving("other tab") as other:
        unload.fn(Request())
        assert scope.cancelled and not other.cancelled


def test_nothing_is_fetched_from_elsewhere():
    assert "http" not in theme.STYLE_SHEET.read_text() and "@import" not in theme.STYLE_SHEET.read_text()
    assert not [sheet for sheet in theme.build_theme()._stylesheets if "//" in sheet]


@pytest.mark.parametrize("error, printed", [(InputError("long"), False), (KeyError("lost"), True), (OSError(), True)])
def test_only_errors_that_nothing_foresaw_are_printed(error, printed):
    shown = failure_of(error)
    assert shown.message and shown.print_exception is printed


def test_hot_reload_patches_again_while_requests_run():
    model, tokenizer = build_tiny("llama"), chat_tokenizer()
    options = {"max_requests": 4, "num_blocks": 64}
    first = Host(model, tokenizer, "tiny", **options)
    build_page(first)
    handle = first.engine.submit([5, 6, 7], max_new_tokens=300, do_sample=False, eos_token_id=-1)
    second = Host(model, tokenizer, "tiny", **options)
    build_page(second)
    assert second.engine is first.engine
    assert len(handle.result(60)) == 300
    with pytest.raises(AlreadyPatchedError):
        Host(model, tokenizer, "tiny", max_requests=5)


def test_a_visitor_who_never_comes_back_leaves_nothing(host):
    async def run():
        with host.visitors.serving("gone"):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert host.visitors.num_served == 0
    threads = [threading.Thread(target=host.visitors.stop, args=("gone",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

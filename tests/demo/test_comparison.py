"""The comparison: both sides really run, and its ticks can fail."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from engine.hooks import at_rest, runs

from hfpaged.demo import stock_run
from hfpaged.demo.comparison import AS_BATCH, MOST_PROMPTS, ONE_BY_ONE, Comparison
from hfpaged.demo.comparison_view import comparison_view
from hfpaged.errors import InputError

PROMPTS = ["Which?", "Why must nobody row?", "What <b>now</b>?"]


def run_through(host, comparison, session="a"):
    async def run():
        with host.visitors.serving(session) as scope:
            return [comparison_view(seen) async for seen in comparison.run(scope)]

    return asyncio.run(run())


@pytest.mark.parametrize("mode", [ONE_BY_ONE, AS_BATCH])
def test_both_sides_give_the_same_texts(host, stock_answer, mode):
    comparison = Comparison(host, PROMPTS, "", 24, mode)
    pages = run_through(host, comparison)
    assert comparison.done and comparison.equal == [True] * 3
    for prompt, ours in zip(PROMPTS, comparison.ours.tracks, strict=True):
        assert ours.text == stock_answer(prompt, 24)
    for lane in (comparison.ours, comparison.stock):
        assert lane.num_tokens > 3 and lane.tokens_per_second > 0
        assert all(0 < track.first_token_seconds <= track.seconds for track in lane.tracks)
    assert pages[-1].count("✓ equal texts") == 3 and "3 of 3 texts are equal" in pages[-1]
    assert "<b>now</b>" not in pages[-1] and "What &lt;b&gt;now&lt;/b&gt;?" in pages[-1]


def test_the_shared_beginning_is_computed_once_and_not_taken_from_earlier_ones(host):
    for _ in range(2):
        before = host.engine.stats()
        run_through(host, Comparison(host, PROMPTS, "Rules of the boathouse. " * 4, 8, ONE_BY_ONE))
        after = host.engine.stats()
        cached = after["cached_prompt_tokens"] - before["cached_prompt_tokens"]
        assert cached == 2 * (len("u:" + ("Rules of the boathouse. " * 4).strip() + "\n\nW") // 16) * 16


def test_a_difference_is_no_tick(host, monkeypatch):
    def wrong(twin, prompts, new_tokens, lane, stopped):
        for track in lane.tracks:
            track.add(5)
            track.finish()

    comparison = Comparison(host, PROMPTS, "", 8, ONE_BY_ONE)
    monkeypatch.setattr(comparison, "_run_stock", wrong)
    page = run_through(host, comparison)[-1]
    assert comparison.equal == [False] * 3
    assert page.count("✗ texts differ") == 3 and "0 of 3 texts are equal" in page


def test_the_stock_side_runs_stock_code_beside_the_engine(host):
    before = host.engine.stats()
    tokens = stock_run.alone(host.stock_twin(), [5, 6, 7], 12)
    after = host.engine.stats()
    assert after["steps"] == before["steps"] and after["fallbacks"] == before["fallbacks"]
    assert host.engine.submit([5, 6, 7], max_new_tokens=12, do_sample=False).result() == tokens


@pytest.mark.parametrize("side", ["ours", "stock"])
def test_stop_ends_either_side(host, side):
    def slow(run, *args):
        time.sleep(0.02 if side == "ours" else 0)
        return run(*args)

    comparison = Comparison(host, ["Go on"] * 4, "", 200, ONE_BY_ONE)

    def stop_when_it_runs():
        lane = getattr(comparison, side)
        while not lane.num_tokens:
            time.sleep(0.001)
        host.visitors.stop("me")

    threading.Thread(target=stop_when_it_runs).start()
    with runs(host.engine, slow):
        page = run_through(host, comparison, session="me")[-1]
    assert comparison.stopped and "Stopped." in page
    assert None in comparison.equal
    assert at_rest(host.engine)


@pytest.mark.parametrize("prompts", [[], ["a"] * (MOST_PROMPTS + 1)])
def test_no_prompt_or_too_many_are_refused(host, prompts):
    with pytest.raises(InputError, match="prompts"):
        Comparison(host, prompts, "", 8, ONE_BY_ONE)

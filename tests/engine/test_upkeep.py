"""Statistics of an engine, what it keeps cached, and when it gives its memory and thread back."""

from __future__ import annotations

import threading
import time

import pytest
from batches import alone, left_padded
from engine.hooks import WAIT_SECONDS
from engine.one_prompt import GREEDY, LONG, PROMPT, Sink, started
from families import build_tiny

import hfpaged
from hfpaged.errors import EngineReleasedError


def test_statistics_add_up(patched):
    model, engine = patched(num_blocks=64)
    assert engine.stats()["blocks_total"] == 0  # nothing is allocated before the first request
    model.generate(**left_padded([PROMPT, PROMPT[:7]]), max_new_tokens=10, **GREEDY)
    stats = engine.stats()
    assert (stats["blocks_total"], stats["blocks_free"], stats["block_size"]) == (64, 64, 16)
    assert stats["prompt_tokens"] == 27
    assert stats["generated_tokens"] == 20
    assert stats["steps"] == 10
    assert stats["blocks_cached"] == 2  # 29 and 16 tokens were computed
    assert stats["cached_prompt_tokens"] == stats["failed_steps"] == stats["weight_changes"] == 0
    assert stats["fallbacks"] == {}
    assert min(stats["seconds_schedule"], stats["seconds_forward"], stats["seconds_sample"]) > 0
    model.generate(**left_padded([PROMPT]), max_new_tokens=2, use_cache=False, **GREEDY)
    assert engine.stats()["fallbacks"] == {"use_cache=False": 1}
    assert engine.stats()["steps"] == 10


def test_statistics_can_be_read_at_any_time(patched, switch_often):
    model, engine = patched()
    stop = threading.Event()
    errors = []

    def read():
        while not stop.is_set():
            try:
                engine.stats()
            except Exception as error:
                errors.append(error)

    def use():
        for _ in range(10):
            model.generate(**left_padded([PROMPT, PROMPT[:3]]), max_new_tokens=8, streamer=Sink(), **GREEDY)

    reader = threading.Thread(target=read)
    users = [threading.Thread(target=use) for _ in range(4)]
    for thread in (reader, *users):
        thread.start()
    for thread in users:
        thread.join(WAIT_SECONDS)
    stop.set()
    reader.join(WAIT_SECONDS)
    assert not errors


@pytest.fixture
def switch_often():
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_reset_prefix_cache_forgets_and_disturbs_nobody(patched, stock_text):
    model, engine = patched()
    alone(model, PROMPT, max_new_tokens=4, **GREEDY)
    running = started(engine.submit(PROMPT, max_new_tokens=40, **GREEDY))
    assert engine.stats()["cached_prompt_tokens"] == 16
    engine.reset_prefix_cache()
    assert engine.stats()["blocks_cached"] == 0
    assert running.result(WAIT_SECONDS) == stock_text
    alone(model, PROMPT, max_new_tokens=4, **GREEDY)
    assert engine.stats()["cached_prompt_tokens"] == 16
    alone(model, PROMPT, max_new_tokens=4, **GREEDY)
    assert engine.stats()["cached_prompt_tokens"] == 32


def test_salted_and_opted_out_requests_share_nothing(patched):
    model, engine = patched()
    for options in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"prefix_cache": False}, {"prefix_cache": False}):
        alone(model, PROMPT, max_new_tokens=2, hfpaged=options, **GREEDY)
    assert engine.stats()["cached_prompt_tokens"] == 0
    for hits, options in enumerate(({}, {"cache_salt": "a"}, {"cache_salt": "b"}), start=1):
        alone(model, PROMPT, max_new_tokens=2, hfpaged=options, **GREEDY)
        assert engine.stats()["cached_prompt_tokens"] == 16 * hits


def test_release_frees_and_the_next_call_builds_again(patched, stock_text):
    engine = patched().engine
    running = started(engine.submit(PROMPT, **LONG))
    waiting = engine.submit(PROMPT, **LONG)
    engine.release()
    for handle in (running, waiting):
        with pytest.raises(EngineReleasedError):
            handle.result(WAIT_SECONDS)
    assert engine.stats()["blocks_total"] == 0
    steps = engine.stats()["steps"]
    assert engine.submit(PROMPT, max_new_tokens=40, **GREEDY).result(WAIT_SECONDS) == stock_text
    assert engine.stats()["blocks_total"] > 0
    assert engine.stats()["steps"] == steps + 40


def test_release_after_call(patched, stock_text):
    model, engine = patched(release_after_call=True)
    for _ in range(3):
        assert alone(model, PROMPT, max_new_tokens=40, **GREEDY) == stock_text
        deadline = time.monotonic() + WAIT_SECONDS
        while engine.stats()["blocks_total"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert engine.stats()["generated_tokens"] == 120


def test_unpatch_ends_what_runs(stock_text):
    model = build_tiny("llama")
    model.patch()
    handle = started(hfpaged.engine(model).submit(PROMPT, **LONG))
    model.unpatch()
    with pytest.raises(EngineReleasedError):
        handle.result(WAIT_SECONDS)
    assert alone(model, PROMPT, max_new_tokens=40, **GREEDY) == stock_text


def test_the_stepping_thread_ends_when_nobody_needs_it(patched):
    model, engine = patched()
    alone(model, PROMPT, max_new_tokens=2, **GREEDY)
    thread = next(one for one in threading.enumerate() if one is engine._driver._thread)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    alone(model, PROMPT, max_new_tokens=2, **GREEDY)

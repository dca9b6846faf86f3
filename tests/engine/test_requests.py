"""engine.submit: handles, and the order of service."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from batches import alone, left_padded, random_prompts
from engine.hooks import WAIT_SECONDS, after_each_step, at_rest, paused, used_blocks
from engine.one_prompt import GREEDY, LONG, PROMPT, Sink, started
from families import build_tiny
from transformers import GenerationConfig

from hfpaged.errors import RequestCancelled


def test_a_handle_gives_the_tokens_in_every_way(patched, stock_text):
    engine = patched().engine
    handle = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    assert list(handle) == stock_text
    assert handle.result() == stock_text
    assert handle.tokens == stock_text
    assert (handle.done, handle.finish_reason, handle.prompt_len) == (True, "length", 20)

    async def read():
        return [token async for token in engine.submit(PROMPT, max_new_tokens=40, **GREEDY)]

    async def read_many():
        return await asyncio.gather(*(read() for _ in range(5)))

    assert asyncio.run(read_many()) == [stock_text] * 5


def test_tokens_arrive_one_by_one(patched):
    handle = patched().engine.submit(PROMPT, **LONG)
    next(iter(handle))
    assert not handle.done
    handle.cancel()


def test_closing_an_iterator_cancels_its_request_and_leaving_the_loop_does_not(patched):
    served = patched()
    handle = served.engine.submit(PROMPT, **LONG)
    for _ in handle:
        break
    tokens = iter(handle)
    next(tokens)
    assert not handle.done
    tokens.close()
    with pytest.raises(RequestCancelled):
        handle.result(WAIT_SECONDS)

    async def read_and_close():
        handle = served.engine.submit(PROMPT, **LONG)
        tokens = aiter(handle)
        assert await anext(tokens) == handle.tokens[0]
        await tokens.aclose()
        with pytest.raises(RequestCancelled):
            [token async for token in tokens]

    asyncio.run(read_and_close())
    assert at_rest(served.engine)


def test_finish_reasons(patched, stock_text):
    engine = patched().engine
    options = {"do_sample": False, "max_new_tokens": 40}
    ended = engine.submit(PROMPT, eos_token_id=stock_text[5], **options)
    assert ended.result(WAIT_SECONDS) == stock_text[: stock_text.index(stock_text[5]) + 1]
    assert ended.finish_reason == "stop"
    assert engine.submit(PROMPT, eos_token_id=-1, **options).result(WAIT_SECONDS) == stock_text


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, iter])
def test_a_prompt_may_be_anything_that_holds_integers(patched, stock_text, form):
    assert patched().engine.submit(form(PROMPT), max_new_tokens=40, **GREEDY).result(WAIT_SECONDS) == stock_text


def test_options_are_merged_as_in_generate(patched):
    model, engine = patched()
    config = GenerationConfig(max_new_tokens=6, repetition_penalty=1.7, do_sample=False)
    model.generation_config.suppress_tokens = [31]
    want = alone(model, PROMPT, generation_config=config)
    assert engine.submit(PROMPT, config).result(WAIT_SECONDS) == want
    assert engine.submit(PROMPT, config, max_new_tokens=3).result(WAIT_SECONDS) == want[:3]


def test_cancel_midway(patched):
    engine = patched().engine
    handle = started(engine.submit(PROMPT, **LONG))
    handle.cancel()
    engine.check()  # a step later
    assert used_blocks(engine) == 0
    assert 1 <= len(handle.tokens) < 450
    assert (handle.done, handle.finish_reason) == (True, "cancelled")
    with pytest.raises(RequestCancelled):
        handle.result()
    read = []
    with pytest.raises(RequestCancelled):
        for token in handle:
            read.append(token)
    assert read == handle.tokens
    handle.cancel()  # once more does nothing


def test_cancel_before_it_starts_and_after_it_ended(patched, stock_text):
    engine = patched(max_requests=1).engine
    first = started(engine.submit(PROMPT, **LONG))
    second = engine.submit(PROMPT, **LONG)
    second.cancel()
    with pytest.raises(RequestCancelled):
        second.result(WAIT_SECONDS)
    assert not second.tokens
    first.cancel()
    third = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    assert third.result(WAIT_SECONDS) == stock_text
    third.cancel()
    assert third.result() == stock_text


def test_timeout_lets_the_request_go_on(patched):
    handle = started(patched().engine.submit(PROMPT, **LONG))
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.001)
    assert len(handle.result(WAIT_SECONDS)) == 450


def test_an_abandoned_iterator_does_not_stop_the_others(patched, stock_text):
    engine = patched().engine
    abandoned = [started(engine.submit(PROMPT, **LONG)) for _ in range(3)]
    assert engine.submit(PROMPT, max_new_tokens=40, **GREEDY).result(WAIT_SECONDS) == stock_text
    for handle in abandoned:
        handle.cancel()


def test_lower_priority_numbers_run_first(patched):
    engine = patched(max_requests=1).engine
    blocker = started(engine.submit(PROMPT, **LONG))
    handles = {
        name: engine.submit(PROMPT, max_new_tokens=20, hfpaged={"priority": priority}, **GREEDY)
        for name, priority in (("late", 5), ("normal", 0), ("urgent", -1), ("normal too", 0))
    }
    with after_each_step(engine, lambda: [name for name, handle in handles.items() if handle.tokens]) as begun:
        blocker.cancel()
        for handle in handles.values():
            handle.result(WAIT_SECONDS)
    order = list(dict.fromkeys(name for step in begun for name in step))
    assert order == ["urgent", "normal", "normal too", "late"]


def test_priority_decides_who_is_preempted(patched):
    """The pool has room for one: the urgent newcomer takes the blocks of the one that runs."""
    engine = patched(num_blocks=30, prefix_caching=False).engine
    slow = started(engine.submit(PROMPT, **{**LONG, "max_new_tokens": 400}))
    urgent = [engine.submit(PROMPT, hfpaged={"priority": -1}, **{**LONG, "max_new_tokens": 200}) for _ in range(2)]
    for handle in urgent:
        handle.result(WAIT_SECONDS)
    assert not slow.done
    assert len(slow.result(WAIT_SECONDS)) == 400


NEIGHBOURS = random_prompts((3, 16, 17, 40, 33), seed=4, common_prefix=20)


@pytest.fixture(scope="module")
def neighbour_texts():
    model = build_tiny("llama")
    return [alone(model, prompt, max_new_tokens=30, **GREEDY) for prompt in NEIGHBOURS]


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("num_blocks", [8, 13, 18])
def test_random_use_keeps_the_books_and_the_texts(patched, neighbour_texts, num_blocks, preemption):
    model, engine = patched(num_blocks=num_blocks, max_batch_tokens=21, max_requests=12, preemption=preemption)
    choose = random.Random(num_blocks)
    handles = []
    alone(model, PROMPT, max_new_tokens=2, **GREEDY)
    with after_each_step(engine, engine.check) as steps:
        for _ in range(8):
            with paused(engine):
                for _ in range(10):
                    which, count = choose.randrange(len(NEIGHBOURS)), choose.randint(1, 30)
                    options = {"cache_salt": choose.choice("abc"), "priority": choose.randrange(2)}
                    handle = engine.submit(NEIGHBOURS[which], max_new_tokens=count, hfpaged=options, **GREEDY)
                    handles.append((which, count, handle))
                choose.choice(handles)[2].cancel()
            rows = choose.sample(range(len(NEIGHBOURS)), 2)
            out = model.generate(
                **left_padded([NEIGHBOURS[row] for row in rows]), max_new_tokens=9, streamer=Sink(), **GREEDY
            )
            assert out[:, -9:].tolist() == [neighbour_texts[row][:9] for row in rows]
            choose.choice(handles)[2].cancel()
            if choose.random() < 0.5:
                engine.reset_prefix_cache()
        for which, count, handle in handles:
            try:
                assert handle.result(WAIT_SECONDS) == neighbour_texts[which][:count]
            except RequestCancelled:
                assert handle.tokens == neighbour_texts[which][: len(handle.tokens)]
    assert len(steps) > 100
    assert engine.stats()["preemptions_swap"] + engine.stats()["preemptions_recompute"] > 0
    assert at_rest(engine)

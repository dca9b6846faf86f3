"""engine.submit: handles, order of service, and what is refused before it is queued."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch
from batches import alone, left_padded, random_prompts
from engine.hooks import WAIT_SECONDS, after_each_step, at_rest, paused, used_blocks
from families import build_tiny
from transformers import GenerationConfig, LogitsProcessor

import hfpaged
from hfpaged.errors import (
    EngineReleasedError,
    InputError,
    NotPatchedError,
    RequestCancelled,
    RequestTooLargeError,
    UnsupportedOptionError,
)

PROMPT = random_prompts((20,))[0]
GREEDY = {"do_sample": False, "eos_token_id": -1}
LONG = {**GREEDY, "max_new_tokens": 450}


@pytest.fixture(scope="module")
def stock_text():
    """What stock gives PROMPT."""
    return alone(build_tiny("llama"), PROMPT, max_new_tokens=40, **GREEDY)


def started(handle):
    """The handle, once its request runs."""
    next(iter(handle))
    return handle


# ---- handles ----


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


# ---- what is refused ----


def test_too_large_a_request_is_refused_with_both_numbers(patched, stock_text):
    model, engine = patched(num_blocks=4)
    for attempt in (
        lambda: engine.submit(PROMPT, max_new_tokens=45, **GREEDY),
        lambda: alone(model, PROMPT, max_new_tokens=45, **GREEDY),
        # The second row alone would fit.
        lambda: model.generate(**left_padded([PROMPT, PROMPT[:3]]), max_new_tokens=45, **GREEDY),
    ):
        with pytest.raises(RequestTooLargeError, match="needs 5 KV blocks but the pool has 4") as caught:
            attempt()
        assert (caught.value.needed, caught.value.available) == (5, 4)
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    assert engine.submit(PROMPT, max_new_tokens=40, **GREEDY).result(WAIT_SECONDS) == stock_text


BAD_SUBMISSIONS = {
    "empty": ([], {}, InputError),
    "outside the vocabulary": ([5, 128], {}, InputError),
    "negative": ([5, -1], {}, InputError),
    "huge": ([2**70], {}, InputError),
    "float": ([5.5], {}, InputError),
    "text": ("hello", {}, InputError),
    "batch": (torch.tensor([[5, 6]]), {}, InputError),
    "unknown option": ([5], {"max_new_tokenz": 3}, UnsupportedOptionError),
    "beams": ([5], {"num_beams": 2}, UnsupportedOptionError),
    "several sequences": ([5], {"num_return_sequences": 2, "do_sample": True}, UnsupportedOptionError),
    "hidden states": ([5], {"output_hidden_states": True}, UnsupportedOptionError),
    "no cache": ([5], {"use_cache": False}, UnsupportedOptionError),
    "guidance": ([5], {"guidance_scale": 2.0}, UnsupportedOptionError),
    "no token": ([5], {"max_new_tokens": 0}, ValueError),
    "negative length": ([5], {"max_new_tokens": -3}, ValueError),
    "max_length": ([5, 6, 7], {"max_length": 3}, ValueError),
    "temperature": ([5], {"temperature": -1.0, "do_sample": True}, ValueError),
    "penalty": ([5], {"repetition_penalty": 0.0}, ValueError),
    "stop strings without a tokenizer": ([5], {"stop_strings": "a"}, ValueError),
    "hfpaged": ([5], {"hfpaged": 3}, UnsupportedOptionError),
    "unknown hfpaged option": ([5], {"hfpaged": {"sed": 3}}, UnsupportedOptionError),
    "seed": ([5], {"hfpaged": {"seed": 2**64}}, UnsupportedOptionError),
    "seeds": ([5], {"hfpaged": {"seed": [1, 2]}}, UnsupportedOptionError),
    "priority": ([5], {"hfpaged": {"priority": 1.5}}, UnsupportedOptionError),
    "salt": ([5], {"hfpaged": {"cache_salt": "x" * 300}}, UnsupportedOptionError),
    "prefix_cache": ([5], {"hfpaged": {"prefix_cache": 1}}, UnsupportedOptionError),
}


@pytest.mark.parametrize("name", BAD_SUBMISSIONS)
def test_bad_submission_is_refused_at_once_and_harms_nobody(patched, stock_text, name):
    prompt, options, error = BAD_SUBMISSIONS[name]
    engine = patched().engine
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(error):
        engine.submit(prompt, **options)
    assert running.result(WAIT_SECONDS) == stock_text
    assert engine.stats()["prompt_tokens"] == len(PROMPT)


def test_hooks_that_a_packed_step_would_skip_are_not_ignored(patched):
    model, engine = patched()
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(UnsupportedOptionError, match="user hooks"):
        engine.submit(PROMPT, **GREEDY)
    hook.remove()
    assert engine.submit(PROMPT, max_new_tokens=2, **GREEDY).result(WAIT_SECONDS)


BAD_BATCHES = {
    "no rows": {"input_ids": torch.zeros(0, 3, dtype=torch.long)},
    "outside the vocabulary": {"input_ids": torch.tensor([[5, 6], [5, 128]])},
    "negative": {"input_ids": torch.tensor([[5, 6], [-200, 7]])},
    "float": {"input_ids": torch.tensor([[5.0, 6.0]])},
    "empty row": {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])},
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batch_is_refused_whole_and_harms_nobody(patched, stock_text, name):
    model, engine = patched()
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(InputError):
        model.generate(**BAD_BATCHES[name], max_new_tokens=5, do_sample=False)
    assert running.result(WAIT_SECONDS) == stock_text
    assert engine.stats()["prompt_tokens"] == len(PROMPT)


def test_a_row_whose_scores_are_no_distribution_fails_alone(patched, stock_text):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("nan"))

    model, engine = patched()
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(RuntimeError):
        model.generate(**left_padded([PROMPT]), do_sample=True, max_new_tokens=5, logits_processor=[Nothing()])
    assert running.result(WAIT_SECONDS) == stock_text


def test_an_option_that_shows_to_be_wrong_later_ends_its_own_request_only(patched, stock_text):
    """Stock, too, finds a bias of a token that does not exist when it first processes scores."""
    engine = patched().engine
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(ValueError, match="vocabulary size is 128"):
        engine.submit([5], sequence_bias={(500,): 1.0}, max_new_tokens=5).result(WAIT_SECONDS)
    assert running.result(WAIT_SECONDS) == stock_text


def test_an_unpatched_model_has_no_engine():
    with pytest.raises(NotPatchedError):
        hfpaged.engine(build_tiny("llama"))


# ---- statistics, cache, release ----


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


class Sink:
    """A streamer that throws everything away."""

    def put(self, value):
        pass

    def end(self):
        pass


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


# ---- anything, at random ----

NEIGHBOURS = random_prompts((3, 16, 17, 40, 33), seed=4, common_prefix=20)


@pytest.fixture(scope="module")
def neighbour_texts():
    model = build_tiny("llama")
    return [alone(model, prompt, max_new_tokens=30, **GREEDY) for prompt in NEIGHBOURS]


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("num_blocks", [8, 13, 24])
def test_random_use_keeps_the_books_and_the_texts(patched, neighbour_texts, num_blocks, preemption):
    model, engine = patched(num_blocks=num_blocks, max_batch_tokens=21, max_requests=12, preemption=preemption)
    choose = random.Random(num_blocks)
    handles = []
    alone(model, PROMPT, max_new_tokens=2, **GREEDY)
    with after_each_step(engine, engine._stepper.check) as steps:
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

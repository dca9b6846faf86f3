"""Streamers in many threads: every reader gets its own text whole, and none waits for what will not come."""

from __future__ import annotations

import asyncio
import io
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import pytest
from batches import alone, left_padded, random_prompts
from families import build_tiny
from generation.fakes import RaisingCriteria
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import hfpaged
from hfpaged.errors import UnsupportedOptionError

PROMPTS = random_prompts((3, 16, 9, 30))
OPTIONS = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 20, "pad_token_id": 0}
WAIT_SECONDS = 20


@pytest.fixture(scope="module")
def texts(pair, tokenizer):
    return [tokenizer.decode(alone(pair.stock, prompt, **OPTIONS)) for prompt in PROMPTS]


def in_thread(model, prompt, streamer, **options):
    call = {**left_padded([prompt]), **OPTIONS, "streamer": streamer, **options}
    thread = threading.Thread(target=quietly, args=(model, call), daemon=True)
    thread.start()
    return thread


def quietly(model, call):
    """An exception in a thread of the user's is the user's."""
    try:
        model.generate(**call)
    except Exception:
        return


class Sink(TextStreamer):
    """A TextStreamer that prints to its own text."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


def test_text_streamers_in_many_threads(pair, tokenizer, texts):
    def run(number):
        sink = Sink(tokenizer)
        in_thread(pair.paged, PROMPTS[number % 4], sink).join(WAIT_SECONDS)
        return sink.text == texts[number % 4]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(24)))


def test_iterator_streamers_in_many_threads(pair, tokenizer, texts):
    def run(number):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
        in_thread(pair.paged, PROMPTS[number % 4], streamer)
        return "".join(streamer) == texts[number % 4]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(24)))


def test_async_iterator_streamers_in_one_loop(pair, tokenizer, texts):
    async def read(number):
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
        in_thread(pair.paged, PROMPTS[number % 4], streamer)
        return "".join([piece async for piece in streamer]) == texts[number % 4]

    async def read_all():
        return await asyncio.gather(*(read(number) for number in range(12)))

    assert all(asyncio.run(read_all()))


def test_text_streamer_on_the_screen(pair, tokenizer, texts):
    with redirect_stdout(io.StringIO()) as printed:
        pair.paged.generate(**left_padded(PROMPTS[:1]), **OPTIONS, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert printed.getvalue().rstrip("\n") == texts[0]


def test_an_exception_in_generation_is_raised_to_the_reader(pair, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
    in_thread(pair.paged, PROMPTS[1], streamer, stopping_criteria=[RaisingCriteria(KeyError("mine"), step=4)])
    began, pieces = time.monotonic(), []
    with pytest.raises(KeyError, match="mine"):
        for piece in streamer:
            pieces.append(piece)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert pieces
    # Who reads on after that comes to an end, too.
    assert len(list(streamer)) <= 1
    assert_at_rest(pair.paged)


def test_a_cancelled_call_just_ends_the_iterator(pair, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
    scope = hfpaged.CancelScope()
    in_thread(pair.paged, PROMPTS[1], streamer, hfpaged={"scope": scope}, max_new_tokens=450)
    began = time.monotonic()
    for _ in streamer:
        scope.cancel()
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert_at_rest(pair.paged)


def test_an_iterator_that_takes_its_items_its_own_way_ends(pair, tokenizer):
    class Lines(TextIteratorStreamer):
        def __next__(self):
            item = self.text_queue.get(timeout=WAIT_SECONDS)
            if item is None:
                raise StopIteration
            return item.upper()

    streamer = Lines(tokenizer, skip_prompt=True)
    in_thread(pair.paged, PROMPTS[1], streamer, stopping_criteria=[RaisingCriteria(KeyError("mine"), step=4)])
    assert list(streamer)


def test_an_exception_is_raised_to_an_async_reader(pair, tokenizer):
    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
        criterion = RaisingCriteria(KeyError("mine"), step=4)
        in_thread(pair.paged, PROMPTS[1], streamer, stopping_criteria=[criterion])
        pieces = []
        with pytest.raises(KeyError, match="mine"):
            async for piece in streamer:
                pieces.append(piece)
        return pieces

    assert asyncio.run(asyncio.wait_for(read(), WAIT_SECONDS / 2))


FAILURES = {
    "before the loop": ({"max_new_tokenz": 3}, ValueError, "max_new_tokenz"),
    "in its validation": ({"num_beams": 2}, ValueError, "streamer"),
    "on the way to the engine": ({"hfpaged": {"seed": -1}}, UnsupportedOptionError, "seed"),
    "in stock code": (
        {"use_cache": False, "stopping_criteria": [RaisingCriteria(KeyError("mine"), step=1)]},
        KeyError,
        "mine",
    ),
}


@pytest.mark.parametrize("options, error, words", FAILURES.values(), ids=FAILURES)
def test_a_call_that_fails_anywhere_releases_its_reader(pair, tokenizer, options, error, words):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
    in_thread(pair.paged, PROMPTS[1], streamer, **options)
    with pytest.raises(error, match=words):
        list(streamer)


def assert_at_rest(model):
    engine, deadline = hfpaged.engine(model), time.monotonic() + WAIT_SECONDS
    while engine.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = engine.stats()
    assert stats["blocks_free"] == stats["blocks_total"]
    engine.check()


@pytest.mark.slow
def test_a_short_prompts_first_token_does_not_wait_for_a_long_prompt(tokenizer):
    source = random.Random(0)
    with hfpaged.patched(build_tiny("llama", max_position_embeddings=31_000)) as model:
        engine = hfpaged.engine(model)
        engine.submit(PROMPTS[0], **OPTIONS).result()
        long = engine.submit([source.randrange(3, 128) for _ in range(30_000)], **OPTIONS)
        while engine.stats()["running"] == 0:
            time.sleep(0.01)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=WAIT_SECONDS)
        in_thread(model, PROMPTS[1], streamer)
        next(iter(streamer))
        assert not long.tokens
        assert "".join(streamer)
        long.cancel()

"""GenerationHandle: one writer, any readers, in threads or in an event loop."""

import asyncio
import threading

import pytest
import torch

from hfpaged.errors import RequestCancelled
from hfpaged.runtime.handle import GenerationHandle


def make_handle(cancelled=None):
    return GenerationHandle(1, 3, (cancelled or []).append)


def filled_later(handle, tokens, reason="stop", error=None):
    def fill():
        for token in tokens:
            handle.push([token])
        handle.finish(reason, error)

    threading.Timer(0.02, fill).start()


def test_iterating_and_waiting_see_all_tokens():
    handle = make_handle()
    filled_later(handle, [4, 5, 6])
    assert list(handle) == [4, 5, 6]
    assert handle.result() == [4, 5, 6]
    assert handle.finish_reason == "stop"


def test_async_iteration_in_two_loops_at_once():
    handle = make_handle()
    results = []

    async def read():
        return [token async for token in handle]

    readers = [threading.Thread(target=lambda: results.append(asyncio.run(read()))) for _ in range(2)]
    for reader in readers:
        reader.start()
    filled_later(handle, range(50))
    for reader in readers:
        reader.join(timeout=10)
    assert results == [list(range(50))] * 2


def test_an_error_reaches_every_kind_of_reader():
    handle = make_handle()
    filled_later(handle, [4], "error", ValueError("bad row"))
    seen = []
    with pytest.raises(ValueError, match="bad row"):
        for token in handle:
            seen.append(token)
    assert seen == [4]
    for read in (handle.result, handle.take_logits):
        with pytest.raises(ValueError, match="bad row"):
            read()


def test_only_the_first_end_counts_and_cancelling_an_ended_one_does_nothing():
    cancelled = []
    handle = make_handle(cancelled)
    handle.finish("length")
    handle.finish("error", ValueError())
    handle.cancel()
    assert handle.finish_reason == "length"
    assert cancelled == []


def test_cancelled_result_raises():
    handle = make_handle()
    handle.finish("cancelled")
    with pytest.raises(RequestCancelled):
        handle.result()


def test_timeout_leaves_the_request_running():
    handle = make_handle()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    assert not handle.done


def test_logits_are_taken_once():
    handle = make_handle()
    handle.offer_logits(torch.ones(3))
    assert handle.take_logits().tolist() == [1, 1, 1]
    threading.Timer(0.02, lambda: handle.finish("stop")).start()
    assert handle.take_logits() is None

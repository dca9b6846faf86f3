"""engine.snapshot() and cancelling through a scope."""

from __future__ import annotations

import pytest
from batches import random_prompts
from engine.hooks import at_rest, used_blocks

import hfpaged
from hfpaged.errors import RequestCancelled

PROMPT = random_prompts((20,))[0]
LONG = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 450}


def test_before_the_first_request_there_is_nothing_to_see(patched):
    engine = patched().engine
    seen = engine.snapshot()
    assert seen.books == ()
    assert seen.stats == engine.stats()


def test_books_and_statistics_are_of_the_same_moment_while_requests_run(patched):
    engine = patched(num_blocks=64).engine
    handles = [engine.submit(PROMPT, **LONG) for _ in range(3)]
    next(iter(handles[-1]))
    for _ in range(20):
        stats, (books,) = engine.snapshot()
        held = {block for request in books.requests for block in request.blocks}
        assert held == {block for block, count in enumerate(books.references) if count}
        assert len(held) == stats["blocks_total"] - stats["blocks_free"]
        assert sum(books.cached) == stats["blocks_cached"]
        assert [request.id for request in books.requests] == [handle.request_id for handle in handles]
    for handle in handles:
        handle.cancel()


def test_a_scope_cancels_what_was_submitted_under_it_and_frees_its_blocks(patched):
    engine = patched().engine
    scope = hfpaged.CancelScope()
    handle = engine.submit(PROMPT, **LONG, hfpaged={"scope": scope})
    next(iter(handle))
    assert used_blocks(engine) > 0
    scope.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(timeout=10)
    assert at_rest(engine)
    with pytest.raises(RequestCancelled):
        engine.submit(PROMPT, **LONG, hfpaged={"scope": scope}).result(timeout=10)

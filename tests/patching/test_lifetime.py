"""A patched model lives no longer than an unpatched one, and a fork right after patching works."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from families import build_tiny
from internals import workspace_of
from oracle import greedy, stats

import hfpaged


@pytest.fixture
def no_collector():
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def stepping_threads():
    return [thread for thread in threading.enumerate() if thread.name == "hfpaged-stepping"]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("tier", ["auto", "leaves", "modules"])
def test_a_dropped_model_is_freed_at_once(no_collector, tier):
    model = build_tiny("llama", num_hidden_layers=2).patch(tier=tier)
    greedy(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_its_weights_and_pool_go_with_the_stepping_thread(no_collector):
    model = build_tiny("llama", num_hidden_layers=2).patch()
    greedy(model)
    engine = hfpaged.engine(model)
    pool = weakref.ref(workspace_of(engine).cache.layers[0].key.untyped_storage())
    weights = weakref.ref(model.lm_head.weight)
    del model, engine
    wait_until(lambda: not stepping_threads())
    assert weights() is None and pool() is None


def test_a_model_that_was_never_asked_is_freed(no_collector):
    model = build_tiny("llama", num_hidden_layers=2).patch()
    gone = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    assert [one() for one in gone] == [None, None]


def test_unpatching_frees_the_pool(no_collector, model):
    greedy(model.patch())
    pool = weakref.ref(workspace_of(hfpaged.engine(model)).cache.layers[0].key.untyped_storage())
    model.unpatch()
    assert pool() is None


def test_replaced_modules_are_freed(no_collector, model):
    greedy(model.patch())
    old = weakref.ref(model.lm_head.weight)
    model.lm_head = torch.nn.Linear(64, 128)
    greedy(model)
    assert old() is None


def test_the_stepping_thread_ends_when_idle(model):
    wait_until(lambda: not stepping_threads())
    greedy(model.patch())
    assert len(stepping_threads()) == 1
    wait_until(lambda: not stepping_threads())
    greedy(model)
    assert stats(model)["cached_prompt_tokens"] > 0


def exit_code_of_child(work, seconds=60.0):
    """Fork, have the child run `work`, and return 0 if it came back true."""
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    ended, status = 0, 0
    deadline = time.monotonic() + seconds
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_fork_generates_on_its_own_engine(model, asked_before):
    want = greedy(model)
    model.patch()
    if asked_before:
        greedy(model)
    assert exit_code_of_child(lambda: greedy(model) == want and not stats(model)["fallbacks"]) == 0
    assert greedy(model) == want

"""What goes wrong stays with whom it concerns: failing forwards, forks, leftovers of dead threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from batches import alone, left_padded, random_prompts
from engine.hooks import WAIT_SECONDS, paused, runs, used_blocks, with_import_paths
from families import build_tiny
from internals import workspace_of

import hfpaged
from hfpaged.errors import EngineDeadError

PROMPTS = random_prompts((20, 5, 33))
GREEDY = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 12}


@pytest.fixture
def warm(patched):
    """A patched model that has run once, and what its prompts give."""

    def build(**options):
        model, engine = patched(**options)
        return model, engine, [alone(model, prompt, **GREEDY) for prompt in PROMPTS]

    return build


class Faulty:
    """A runner that fails in some of its runs, before or after the forward."""

    def __init__(self, failures, after_the_forward=False, error=RuntimeError):
        self.failures, self.after_the_forward, self.error = failures, after_the_forward, error
        self.calls = 0

    def __call__(self, run, *args):
        self.calls += 1
        fails = self.calls in self.failures
        if fails and not self.after_the_forward:
            raise self.error(f"run {self.calls} failed")
        output = run(*args)
        if fails:
            raise self.error(f"run {self.calls} failed")
        return output


@pytest.mark.parametrize("after_the_forward", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 5, "preemption": "swap"}, {"num_blocks": 5}])
def test_a_step_that_fails_once_is_repeated(warm, options, after_the_forward):
    model, engine, want = warm(prefix_caching=False, **options)
    with runs(engine, Faulty({1, 3, 6, 8, 11}, after_the_forward)):
        out = model.generate(**left_padded(PROMPTS), **GREEDY)
    assert out[:, 33:].tolist() == want
    assert engine.stats()["failed_steps"] == 5


def test_a_step_that_fails_twice_fails_its_requests_and_the_engine_lives_on(warm):
    model, engine, want = warm()
    with runs(engine, Faulty({4, 5})):
        with pytest.raises(RuntimeError, match="run 5 failed"):
            model.generate(**left_padded(PROMPTS), **GREEDY)
        assert used_blocks(engine) == 0
        assert model.generate(**left_padded(PROMPTS), **GREEDY)[:, 33:].tolist() == want
    engine.check()


def test_running_out_of_memory_is_an_error_of_the_request(warm):
    model, engine, want = warm()
    with runs(engine, Faulty(range(1, 100), error=MemoryError)):
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        for handle in handles:
            with pytest.raises(MemoryError):
                handle.result(WAIT_SECONDS)
            assert handle.finish_reason == "error"
    assert alone(model, PROMPTS[0], **GREEDY) == want[0]


def test_only_requests_of_the_failed_step_fail(warm):
    """The one that waits for a slot was not in it."""
    _, engine, want = warm(max_requests=1)
    with runs(engine, Faulty({1, 2})):
        with paused(engine):
            handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        with pytest.raises(RuntimeError):
            handles[0].result(WAIT_SECONDS)
    assert [handle.result(WAIT_SECONDS) for handle in handles[1:]] == want[1:]


def test_a_streamer_waits_for_no_token_that_cannot_come(warm):
    """A reader in another thread sees the error in bounded time."""
    _, engine, want = warm()
    seen, errors = [], []

    def read(handle):
        try:
            seen.extend(handle)
        except RuntimeError as error:
            errors.append(str(error))

    with runs(engine, Faulty({6, 7})):
        handle = engine.submit(PROMPTS[0], **GREEDY)
        reader = threading.Thread(target=read, args=(handle,))
        reader.start()
        reader.join(WAIT_SECONDS)
    assert seen == want[0][:5]
    assert errors == ["run 7 failed"]


def test_an_unexpected_error_in_the_books_ends_everybody_and_the_engine_lives_on(warm):
    """That is a bug of ours, but no reason to leave callers waiting for ever."""
    model, engine, want = warm()
    scheduler = workspace_of(engine).scheduler
    scheduler.plan = lambda: {}["lost"]
    with paused(engine):
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    for handle in handles:
        with pytest.raises(KeyError, match="lost"):
            handle.result(WAIT_SECONDS)
    assert alone(model, PROMPTS[0], **GREEDY) == want[0]


SCRIPT_HEAD = textwrap.dedent(
    """
    import os, sys, threading
    import torch
    torch.set_num_threads(1)
    from batches import alone, random_prompts
    from families import build_tiny
    import hfpaged

    PROMPT = random_prompts((20,))[0]
    OPTIONS = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 12}
    model = build_tiny("llama")
    want = alone(model, PROMPT, **OPTIONS)
    threads = threading.active_count()
    model.patch()
    assert threading.active_count() == threads

    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if work() else 3)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(4)
        assert os.waitpid(child, 0)[1] == 0, "the child failed"

    def works():
        return alone(model, PROMPT, **OPTIONS) == want

    def is_refused():
        try:
            alone(model, PROMPT, **OPTIONS)
        except hfpaged.errors.ForkedEngineError:
            return True
        return False
    """
)

FORKS = textwrap.dedent(
    """
    in_child(works)  # before the first request
    assert works()
    in_child(works)  # after the last one
    handle = hfpaged.engine(model).submit(PROMPT, **{**OPTIONS, "max_new_tokens": 450})
    next(iter(handle))
    in_child(is_refused)  # while one runs
    assert len(handle.result(60)) == 450
    in_child(works)
    assert works()
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forks_work_except_while_requests_run():
    """In a process of its own, since a fork of this one would take along whatever other tests left running."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT_HEAD + FORKS],
        env=with_import_paths(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_exit_handlers_that_run_after_the_engines_own_neither_wait_nor_fail():
    model = build_tiny("llama")
    model.patch()
    engine = hfpaged.engine(model)
    handle = engine.submit(PROMPTS[0], **{**GREEDY, "max_new_tokens": 450})
    tokens = iter(handle)
    next(tokens)
    engine._driver._thread.end()
    with pytest.raises(EngineDeadError, match="exiting"):
        handle.result()
    with pytest.raises(EngineDeadError, match="exiting"):
        list(tokens)
    tokens.close()
    with pytest.raises(EngineDeadError, match="exiting"):
        engine.submit(PROMPTS[0], **GREEDY)
    engine.check()
    engine.snapshot()
    assert model.unpatch() is model


LEFT_AT_EXIT = {
    "idle": "assert works()",
    "running": 'next(iter(hfpaged.engine(model).submit(PROMPT, **{**OPTIONS, "max_new_tokens": 450})))',
}


@pytest.mark.parametrize("state", LEFT_AT_EXIT)
def test_the_process_exits_cleanly_whatever_the_engine_does(state):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT_HEAD + LEFT_AT_EXIT[state]],
        env=with_import_paths(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr

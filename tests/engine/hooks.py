"""Looking at an engine while it steps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from internals import workspace_of

from hfpaged.generation.engine import Engine

WAIT_SECONDS = 30


@contextlib.contextmanager
def after_each_step(engine: Engine, look: Callable[[], Any]) -> Iterator[list]:
    """Call `look` on the stepping thread after every step. Yields the list of its results; its errors are raised."""
    results: list = []
    errors: list[Exception] = []
    step = engine._driver._step

    def stepped() -> bool:
        more = step()
        if more and not errors:
            try:
                results.append(look())
            except Exception as error:
                errors.append(error)
        return more

    engine._driver._step = stepped
    try:
        yield results
    finally:
        engine._driver._step = step
    if errors:
        raise errors[0]


@contextlib.contextmanager
def runs(engine: Engine, replacement: Callable[..., Any]) -> Iterator[None]:
    """Have `replacement(run, plan, ...)` run the plans instead of the runner's own `run`."""
    runner = workspace_of(engine).runner
    run = runner.run
    runner.run = lambda *args: replacement(run, *args)
    try:
        yield
    finally:
        del runner.run


@contextlib.contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """No step for the block: whatever is submitted in it arrives together.

    Do not wait for the engine inside; a first request does, so there must have been one.
    """
    has_stopped, go_on = threading.Event(), threading.Event()
    engine._driver.post(lambda: (has_stopped.set(), go_on.wait(WAIT_SECONDS)))
    # What is posted before the thread takes this command would be taken with it.
    assert has_stopped.wait(WAIT_SECONDS)
    try:
        yield
    finally:
        go_on.set()


def used_blocks(engine: Engine) -> int:
    """Blocks that some request holds."""
    stats = engine.stats()
    return stats["blocks_total"] - stats["blocks_free"]


def at_rest(engine: Engine) -> bool:
    """Whether the engine comes to hold nothing, with its books in order."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        engine.check()
        stats = engine.stats()
        if stats["running"] == stats["waiting"] == stats["blocks_swapped"] == used_blocks(engine) == 0:
            return True
        time.sleep(0.005)
    return False


def with_import_paths() -> dict[str, str]:
    """Environment of a child process that imports what this one can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

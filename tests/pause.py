"""Holds an engine still in the middle of its work, so that a test can do something there for certain."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from internals import workspace_of

import hfpaged


@contextlib.contextmanager
def paused_at_step(model: Any, number: int) -> Iterator[threading.Event]:
    """The engine of `model`, which has run before, stops before its step `number` until the block ends.

    Yields:
        What is set when it has stopped.
    """
    runner = workspace_of(hfpaged.engine(model)).runner
    reached, go_on = threading.Event(), threading.Event()
    run, steps = runner.run, iter(range(1, 1 << 30))

    def run_or_wait(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == number:
            reached.set()
            go_on.wait(60)
        return run(*args, **kwargs)

    runner.run = run_or_wait
    try:
        yield reached
    finally:
        runner.run = run
        go_on.set()

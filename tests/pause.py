"""Holds an engine still in the middle of its work, so that a test can do something there for certain."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from engine.hooks import runs

import hfpaged


@contextlib.contextmanager
def paused_at_step(model: Any, number: int) -> Iterator[threading.Event]:
    """The engine of `model`, which has run before, stops before its step `number` until the block ends.

    Yields:
        What is set when it has stopped.
    """
    reached, go_on = threading.Event(), threading.Event()
    steps = itertools.count(1)

    def run_or_wait(run: Callable[..., Any], *args: Any) -> Any:
        if next(steps) == number:
            reached.set()
            go_on.wait(60)
        return run(*args)

    try:
        with runs(hfpaged.engine(model), run_or_wait):
            yield reached
    finally:
        go_on.set()

"""Driver: the one thread that steps an engine. It starts with the first request and ends after a short idle time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from hfpaged.errors import ForkedEngineError

logger = logging.getLogger(__name__)


class Driver:
    """Runs commands and steps on one thread, so that whatever they touch needs no lock.

    Args:
        step: does one step; returns False when there is nothing to do until the next command.
        has_live_requests: whether a fork now would lose requests.
        on_error: told of what escapes from a step or command, which is always a bug; must leave nobody waiting.
        idle_seconds: how long the thread waits for a command before it ends.

    Attributes:
        listeners: called on the stepping thread after each round of commands and step. They must not block or raise.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        has_live_requests: Callable[[], bool],
        on_error: Callable[[BaseException], None] = lambda error: None,
        idle_seconds: float = 1.0,
    ):
        self._step = step
        self._has_live_requests = has_live_requests
        self._on_error = on_error
        self._idle_seconds = idle_seconds
        self.listeners: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._stopping = False

    def post(self, command: Callable[[], None]) -> None:
        """Have the stepping thread run `command` between two steps. Never blocks. Commands must not raise.

        Raises:
            ForkedEngineError: this process was forked while requests were running.
        """
        self._require_own_process()
        with self._wake:
            self._commands.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hfpaged-stepping", daemon=True)
                # A thread that has used PyTorch and outlives the interpreter makes the process abort as it exits.
                atexit.register(self._stop)
                self._thread.start()
            else:
                self._wake.notify()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two steps and return what it returns, or raise what it raises."""
        if threading.current_thread() is self._thread:
            return function()
        outcome = _Outcome()
        self.post(lambda: outcome.settle(function))
        return outcome.wait()

    def _require_own_process(self) -> None:
        if self._pid == os.getpid():
            return
        if self._has_live_requests():
            raise ForkedEngineError(
                "this process was forked while requests were running on the engine; fork before the first request, "
                "or after the last has finished"
            )
        # The parent's thread does not exist here, and its lock may have been held at the fork.
        self._reset()

    def _stop(self) -> None:
        """At the exit of the process: end the thread, after the step that it is in. Requests stay where they are."""
        if self._pid != os.getpid():
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._stopping = False

    def _run(self) -> None:
        busy = False
        while True:
            with self._wake:
                if not busy and not self._commands and not self._stopping:
                    self._wake.wait(self._idle_seconds)
                if self._stopping or (not busy and not self._commands):
                    self._thread = None
                    if not self._stopping:
                        atexit.unregister(self._stop)
                    return
                commands, self._commands = self._commands, []
            for command in commands:
                self._guarded(command)
            busy = bool(self._guarded(self._step))
            for listener in self.listeners:
                listener()

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as error:  # a stepping thread that dies leaves every caller waiting for ever
            logger.exception("hfpaged: an error escaped from the stepping thread; this is a bug")
            self._on_error(error)
            return False


class _Outcome:
    """Result of a function that another thread runs."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def settle(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except BaseException as error:  # handed to the waiting caller
            self._error = error
        self._done.set()

    def wait(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

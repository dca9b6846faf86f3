"""Driver: the one thread that steps an engine. It starts with the first request and ends after a short idle time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from hfpaged.errors import EngineDeadError, ForkedEngineError

logger = logging.getLogger(__name__)


class SteppingThread(threading.Thread):
    """A thread that runs a driver's loop until that returns, or until `end`.

    Attributes:
        stopping: set by `end`; the loop looks at it with `wake` held.
    """

    def __init__(self, loop: Callable[[], None], wake: threading.Condition):
        super().__init__(target=loop, name="hfpaged-stepping", daemon=True)
        self.stopping = False
        self._wake = wake

    def end(self) -> None:
        """Have the loop return after the step that it is in, and wait until the thread is over."""
        with self._wake:
            self.stopping = True
            self._wake.notify_all()
        self.join()


@atexit.register
def _end_stepping_threads() -> None:
    """Let no stepping thread outlive the interpreter: one that then frees a tensor makes the process abort.

    A loop that returns by itself may free the last tensors of its engine on its thread, so it is the thread that has
    to be waited for, whatever its driver is doing.
    """
    for thread in threading.enumerate():
        if isinstance(thread, SteppingThread):
            thread.end()


class Driver:
    """Runs commands and steps on one thread, so that whatever they touch needs no lock.

    Args:
        step: does one step; returns False when there is nothing to do until the next command.
        has_live_requests: whether a fork now would lose requests.
        on_error: told of what escapes from a step or command, which is always a bug; must leave nobody waiting.
        on_end: called on the thread when it is ended for good. It must not block or raise.
        idle_seconds: how long the thread waits for a command before it ends.

    Attributes:
        ended: its thread was ended for good, at the exit of the process.
        listeners: called on the stepping thread after each round of commands and step. They must not block or raise.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        has_live_requests: Callable[[], bool],
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_end: Callable[[], None] = lambda: None,
        idle_seconds: float = 1.0,
    ):
        self._step = step
        self._has_live_requests = has_live_requests
        self._on_error = on_error
        self._on_end = on_end
        self._idle_seconds = idle_seconds
        self.listeners: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._thread: SteppingThread | None = None
        self.ended = False

    def post(self, command: Callable[[], None]) -> None:
        """Have the stepping thread run `command` between two steps. Never blocks. Commands must not raise.

        Raises:
            ForkedEngineError: this process was forked while requests were running.
            EngineDeadError: this process is exiting.
        """
        self._require_own_process()
        with self._wake:
            if self.ended:
                raise EngineDeadError("the engine has ended, because this process is exiting")
            self._commands.append(command)
            if self._thread is None:
                self._thread = SteppingThread(self._run, self._wake)
                self._thread.start()
            else:
                self._wake.notify()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` between two steps and return what it returns, or raise what it raises.

        After the last step, at the exit of the process, it runs on the thread that calls.
        """
        if self.ended or threading.current_thread() is self._thread:
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

    def _run(self) -> None:
        thread, busy = self._thread, False
        while True:
            with self._wake:
                if not busy and not self._commands and not thread.stopping:
                    self._wake.wait(self._idle_seconds)
                if thread.stopping or (not busy and not self._commands):
                    self._thread, self.ended = None, thread.stopping
                    break
                commands, self._commands = self._commands, []
            for command in commands:
                self._guarded(command)
            busy = bool(self._guarded(self._step))
            for listener in self.listeners:
                listener()
        if thread.stopping:
            # Somebody may wait for what the last commands do.
            for command in self._commands:
                self._guarded(command)
            self._on_end()

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

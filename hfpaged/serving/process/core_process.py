"""CoreProcess: the engine's operating system process, seen from the client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from hfpaged.serving.process.settings import CoreSettings

MODULE = "hfpaged.serving.process.worker"


class CoreProcess:
    """Starts the process and knows how it ended.

    Attributes:
        exited_fd: a descriptor that is readable once the process has ended.
    """

    def __init__(self, settings: CoreSettings):
        self._popen = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE)
        self.exited_fd = os.pidfd_open(self._popen.pid)
        # Kept open: its end is how the process learns of ours.
        self._stdin = self._popen.stdin
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(settings.to_line())
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_exited(self) -> bool:
        """Whether it has ended."""
        return self._popen.poll() is not None

    def how_it_ended(self) -> str:
        """In words, of a process that has ended."""
        code = self._popen.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def end(self, patience_seconds: float) -> None:
        """Have it end, by force after a while. Returns when it has; may be called again."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._popen.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def close(self) -> None:
        """Release the descriptor of an ended process."""
        os.close(self.exited_fd)

"""Wakeup: lets any thread end another one's wait in a poll."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A pipe with at most one byte in it. Poll `fileno()` for reading."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._is_set = False
        self._is_open = True

    def fileno(self) -> int:
        """The file descriptor that becomes readable."""
        return self._read

    def set(self) -> None:
        """Wake the reader. Never blocks; costs a system call only if the reader has not been woken yet."""
        with self._lock:
            if self._is_open and not self._is_set:
                self._is_set = True
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Be ready for the next `set`. Whatever was set before must be looked at after this."""
        with self._lock:
            if self._is_open and self._is_set:
                os.read(self._read, 1)
                self._is_set = False

    def close(self) -> None:
        """Release the pipe; a later `set` does nothing."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._read)
                os.close(self._write)

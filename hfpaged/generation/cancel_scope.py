"""CancelScope: ends calls from another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hfpaged.runtime.handle import GenerationHandle


class CancelScope:
    """Cancels all calls that were given it: `generate(..., hfpaged={"scope": scope})`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[GenerationHandle] = []
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has been called."""
        return self._cancelled

    def cancel(self) -> None:
        """End the scope's running calls with `RequestCancelled`, and every later one at once."""
        with self._lock:
            self._cancelled = True
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.cancel()

    def add(self, handles: Iterable[GenerationHandle]) -> None:
        """Put requests under this scope."""
        with self._lock:
            self._handles = [handle for handle in self._handles if not handle.done]
            self._handles += handles
        if self._cancelled:
            self.cancel()

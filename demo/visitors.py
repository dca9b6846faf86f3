"""Visitors: what each browser session has running, so that it can be stopped when asked to, or when its tab closes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import hfpaged


class Visitors:
    """Cancel scopes by session. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, set[hfpaged.CancelScope]] = {}

    @property
    def num_served(self) -> int:
        """Scopes that are open: answers and comparisons under way."""
        with self._lock:
            return sum(len(scopes) for scopes in self._scopes.values())

    @contextlib.contextmanager
    def serving(self, session: str) -> Iterator[hfpaged.CancelScope]:
        """A scope for the requests of one event of this session. What still runs at the end of the block is ended."""
        scope = hfpaged.CancelScope()
        with self._lock:
            self._scopes.setdefault(session, set()).add(scope)
        try:
            yield scope
        finally:
            scope.cancel()
            with self._lock:
                scopes = self._scopes.get(session, set())
                scopes.discard(scope)
                if not scopes:
                    self._scopes.pop(session, None)

    def stop(self, session: str) -> None:
        """End whatever the session has running; its blocks are free within a step."""
        with self._lock:
            scopes = list(self._scopes.get(session, ()))
        for scope in scopes:
            scope.cancel()

"""EngineWatch: one picture of the engine for all who watch, made no more often than it costs little."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from hfpaged.demo.block_map import COLUMNS
from hfpaged.demo.engine_view import engine_view
from hfpaged.demo.rate_chart import RateHistory
from hfpaged.generation.engine import Engine
from hfpaged.runtime.stats import EngineSnapshot

MOST_BLOCKS = 32 * COLUMNS
# Pictures are sent this often to one watcher, and to all together; the more watch, the slower it gets for each.
PICTURES_PER_SECOND = 2.5
PICTURES_PER_SECOND_FOR_ALL = 25
# Who has not asked for so long has gone.
GONE_AFTER_SECONDS = 15.0


class Picture(NamedTuple):
    """What to tell one watcher.

    Attributes:
        html: None if it is the one that the watcher has.
        seconds: when to ask again.
    """

    html: str | None
    seconds: float


class EngineWatch:
    """All methods may be called from any thread."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._renewing = threading.Lock()
        self._watching = threading.Lock()
        self._history = RateHistory()
        self._seen: EngineSnapshot | None = None
        self._html = ""
        self._made_at = 0.0
        # Session -> when it last asked, and what it got.
        self._watchers: dict[str, tuple[float, str]] = {}

    def look(self, session: str) -> Picture:
        """The present picture for a watcher, who is told when to ask next."""
        now = time.monotonic()
        # One makes the picture, which may take as long as a step; the others get the last one meanwhile.
        if now - self._made_at >= 0.8 / PICTURES_PER_SECOND and self._renewing.acquire(blocking=False):
            try:
                self._renew()
            finally:
                self._renewing.release()
        html = self._html
        with self._watching:
            _, had = self._watchers.get(session, (0.0, ""))
            self._watchers[session] = (now, html)
            num_watching = self._forget_who_has_gone(now)
        seconds = max(1 / PICTURES_PER_SECOND, num_watching / PICTURES_PER_SECOND_FOR_ALL)
        return Picture(None if html is had else html, seconds)

    def _renew(self) -> None:
        stats = self._engine.stats()
        # An idle engine has no news, and need not be woken to say so.
        if self._seen is None or stats != self._seen.stats or stats["running"] or stats["waiting"]:
            self._seen = self._engine.snapshot(max_blocks=MOST_BLOCKS)
        now = time.monotonic()
        self._history.add(now, self._seen.stats["generated_tokens"])
        html = engine_view(self._seen, self._history.rates(now))
        if html != self._html:
            self._html = html  # the same object stands for the same picture
        self._made_at = now

    def _forget_who_has_gone(self, now: float) -> int:
        """Returns how many watch."""
        for session, (asked, _) in list(self._watchers.items()):
            if now - asked > GONE_AFTER_SECONDS:
                self._watchers.pop(session, None)
        return len(self._watchers)

"""Runs the app under uvicorn, and lets running requests finish when it is told to end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from hfpaged.serving.api.server_state import ServerState

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# For responses that are being written when the last text has ended.
LAST_BYTES_SECONDS = 5
BACKLOG = 2048


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT: take no new texts, /health turns, end when those that run have. On the second:
    end now."""

    def __init__(self, config: uvicorn.Config, state: ServerState):
        super().__init__(config)
        self._state = state
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler."""
        if self._state.is_draining:
            self.force_exit = self.should_exit = True
            return
        self._state.is_draining = True
        logger.info("%s: finishing %d text(s)", signal.Signals(sig).name, self._state.num_open)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._state.client.load_error is not None:
            self.should_exit = True
        if self._state.is_draining and self._drain is None:
            self._drain = asyncio.create_task(self._finish())
        return await super().on_tick(counter)

    async def _finish(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._state.limits.drain_seconds
        while self._state.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self.should_exit = True


def serve(app: FastAPI, state: ServerState, host: str, port: int, uds: str | None = None) -> None:
    """Serve until told to end. Returns after the last request.

    Raises:
        EngineDeadError: the model cannot be loaded.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        uds=uds,
        access_log=False,
        log_level="warning",
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
    )
    DrainingServer(config, state).run()
    if state.client.load_error is not None:
        raise state.client.load_error


def log_to_stderr() -> None:
    """Access log as bare JSON lines, everything else as text."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    access = logging.getLogger("hfpaged.access")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.propagate = False

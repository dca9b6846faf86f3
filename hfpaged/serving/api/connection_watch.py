"""Runs a handler's work only as long as its client is there and reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
CHECK_SECONDS = 1.0


class ClientGoneError(Exception):
    """The client closed the connection, or has not read for too long."""


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, Result], is_stalled: Callable[[], bool] = lambda: False
) -> Result:
    """The result of `work`, which is cancelled when the client leaves or stalls.

    Raises:
        ClientGoneError: the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        while not working.done() and not leaving.done():
            await asyncio.wait({working, leaving}, timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if is_stalled():
                break
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Server-sent events from an iterator of their payloads.

    A client that reads slowly holds its own iterator up and nobody else; one that takes nothing for `stall_seconds`
    is disconnected.

    Args:
        events: JSON payloads. Must not raise but to be cancelled.
        on_close: called in the end, however that comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stall_seconds: float, on_close: Callable[[], Awaitable[None]]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stall_seconds = stall_seconds
        self._on_close = on_close
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError, OSError):
                await while_connected(receive, self._send_all(send), self._is_stalled)
        finally:
            await self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                self._sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
                self._sending_since = None
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_stalled(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since > self._stall_seconds

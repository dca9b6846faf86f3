"""Answer: the response to a request that generates, whole or as a stream of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from hfpaged.serving.api.connection_watch import EventStream, while_connected
from hfpaged.serving.api.errors import api_error_of
from hfpaged.serving.api.generation import Generation
from hfpaged.serving.api.schemas import ChatBody, CompletionBody
from hfpaged.serving.api.server_state import ServerState

DONE = b"[DONE]"


class Answer(ABC):
    """What both kinds of completion have in common.

    Attributes:
        whole_kind, chunk_kind: `object` of the response and of the chunks of a stream.
    """

    whole_kind: str
    chunk_kind: str

    def __init__(
        self,
        state: ServerState,
        body: ChatBody | CompletionBody,
        stamp: dict[str, Any],
        generations: Sequence[Generation],
    ):
        self._state, self._body, self._stamp, self._generations = state, body, stamp, generations

    async def respond(self, request: Request) -> Response:
        """The response that the body asks for. However it ends, so do the generations."""
        if self._body.stream:
            stall_seconds = self._state.limits.stall_seconds
            return EventStream(self._events(), stall_seconds, lambda: self._state.end(request, self._generations))
        try:
            choices = await while_connected(request.receive, self._whole_choices())
        finally:
            await self._state.end(request, self._generations)
        whole = {**self._head(self.whole_kind), "choices": choices, "usage": self._usage()}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    @abstractmethod
    async def _whole_choices(self) -> list[dict[str, Any]]:
        """The choices of the response without streaming."""

    @abstractmethod
    def _streamed_choices(self) -> AsyncIterator[dict[str, Any]]:
        """The choice of each chunk of a stream."""

    async def _events(self) -> AsyncIterator[bytes]:
        """The payloads of a stream. An error ends it with an error object."""
        head = self._head(self.chunk_kind)
        try:
            async for choice in self._streamed_choices():
                yield msgspec.json.encode({**head, "choices": [choice]})
            if self._body.reports_usage:
                yield msgspec.json.encode({**head, "choices": [], "usage": self._usage()})
            yield DONE
        except Exception as error:  # the response has begun: this is the only way to tell
            yield msgspec.json.encode(api_error_of(error).body())

    def _head(self, kind: str) -> dict[str, Any]:
        return {**self._stamp, "object": kind, "model": self._state.name}

    def _usage(self) -> dict[str, int]:
        return self._state.usage(self._generations, self._body.num_choices)

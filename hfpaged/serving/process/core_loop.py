"""CoreLoop: passes messages between the client and the engine, beside the thread that steps the engine."""

from __future__ import annotations

import logging
import os

import msgspec
import zmq

from hfpaged.errors import HfpagedError, InputError
from hfpaged.generation.engine import Engine
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.serving.process.faults import fault_of
from hfpaged.serving.process.messages import (
    Cancel,
    Output,
    Progress,
    Query,
    Reply,
    Report,
    Request,
    Stop,
    Submit,
    SubmitOptions,
    encode,
    request_decoder,
)
from hfpaged.serving.process.outbox import Outbox
from hfpaged.serving.process.transport import EngineSockets
from hfpaged.serving.process.wakeup import Wakeup

logger = logging.getLogger(__name__)

# Preparing a request takes about a millisecond, and tokens of the others should not wait for many of them.
MOST_REQUESTS_AT_ONCE = 8
CHECK_PARENT_MILLISECONDS = 500


class CoreLoop:
    """Runs until the client says so or is gone.

    While the client does not take what is sent, nothing more is read from it either: what it sends then waits in the
    socket, and when that is full it is refused on its own side.
    """

    def __init__(self, engine: Engine, sockets: EngineSockets, parent: int):
        self._engine = engine
        self._sockets = sockets
        self._parent = parent
        self._decoder = request_decoder()
        self._outbox = Outbox()
        self._reports: list[Report] = []
        self._unsent: bytes | None = None
        self._news = Wakeup()
        self._is_running = True
        engine.add_listener(self._news.set)

    def run(self) -> None:
        """Serve. Returns when the client asks for the end or has died."""
        poller = zmq.Poller()
        poller.register(self._news.fileno(), zmq.POLLIN)
        while self._is_running and os.getppid() == self._parent:
            is_blocked = self._unsent is not None
            poller.register(self._sockets.requests, 0 if is_blocked else zmq.POLLIN)
            poller.register(self._sockets.reports, zmq.POLLOUT if is_blocked else 0)
            poller.poll(CHECK_PARENT_MILLISECONDS)
            self._news.clear()
            if not is_blocked:
                self._receive()
            self._send()

    def _receive(self) -> None:
        for _ in range(MOST_REQUESTS_AT_ONCE):
            try:
                data = self._sockets.requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(self._decoder.decode(data))
            except msgspec.DecodeError as error:
                # The client checks what it sends, so this is a bug or a stranger; there is nobody to answer.
                logger.error("hfpaged: dropped a message that cannot be decoded: %s", error)
        # There may be more, and the socket does not say so again.
        self._news.set()

    def _handle(self, request: Request) -> None:
        if isinstance(request, Submit):
            self._submit(request)
        elif isinstance(request, Cancel):
            self._outbox.cancel(request.id)
        elif isinstance(request, Query):
            self._reports.append(self._answer(request))
        elif isinstance(request, Stop):
            self._is_running = False

    def _submit(self, request: Submit) -> None:
        try:
            handle = submit(self._engine, request.prompt, request.options)
        except Exception as error:  # one request's, whatever it is: the client gets it
            if not isinstance(error, (HfpagedError, ValueError)):
                logger.exception("hfpaged: a request could not be submitted")
            self._reports.append(Progress([Output(request.id, [], "error", fault_of(_as_input_error(error)))]))
            return
        self._outbox.add(request.id, handle)

    def _answer(self, query: Query) -> Reply:
        try:
            value = getattr(self._engine, query.name)()
        except Exception as error:  # goes to whoever asked
            return Reply(query.id, fault=fault_of(error))
        return Reply(query.id, value)

    def _send(self) -> None:
        while True:
            if self._unsent is None:
                self._unsent = self._next_message()
            if self._unsent is None:
                return
            try:
                self._sockets.reports.send(self._unsent, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent = None

    def _next_message(self) -> bytes | None:
        if self._reports:
            return encode(self._reports.pop(0))
        outputs = self._outbox.collect()
        return encode(Progress(outputs)) if outputs else None


def submit(engine: Engine, prompt: list[int], options: SubmitOptions) -> GenerationHandle:
    """`engine.submit` with the options that were sent."""
    keywords = _set_fields(options)
    extras = keywords.pop("hfpaged", None)
    return engine.submit(prompt, hfpaged=_set_fields(extras) if extras is not None else None, **keywords)


def _set_fields(options: msgspec.Struct) -> dict[str, object]:
    fields = ((name, getattr(options, name)) for name in options.__struct_fields__)
    return {name: value for name, value in fields if value is not msgspec.UNSET}


def _as_input_error(error: Exception) -> Exception:
    """Transformers refuses options with a plain ValueError."""
    is_theirs = isinstance(error, ValueError) and not isinstance(error, HfpagedError)
    return InputError(str(error)) if is_theirs else error

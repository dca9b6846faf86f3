"""Connection: one life of the engine's process, and the requests that depend on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from hfpaged.errors import EngineBusyError, EngineDeadError, HfpagedError
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.serving.process.core_process import CoreProcess
from hfpaged.serving.process.faults import error_of
from hfpaged.serving.process.messages import (
    Fatal,
    Loading,
    ModelInfo,
    Output,
    Progress,
    Ready,
    Reply,
    Report,
    Request,
    encode,
    report_decoder,
)
from hfpaged.serving.process.settings import CoreSettings
from hfpaged.serving.process.transport import ClientSockets
from hfpaged.serving.process.wakeup import Wakeup

logger = logging.getLogger(__name__)

# The exit of the process and its reports are polled for; this only bounds how long unsent cancellations wait.
POLL_MILLISECONDS = 200
END_PATIENCE_SECONDS = 3.0


class Connection:
    """Starts a process and reads what it reports on a thread of its own, until the process ends.

    Args:
        settings: for the process.
        sockets: whose addresses the settings have; closed at the end.
        on_progress: told (stage, fraction) while the process loads, on the reading thread.
        on_end: called once, on the reading thread, with what every waiting caller gets.

    Attributes:
        ready: set when the model is loaded, or will never be.
        info: of the model, once it is loaded.
        error: why the process has ended; None while it has not.
    """

    def __init__(
        self,
        settings: CoreSettings,
        sockets: ClientSockets,
        on_progress: Callable[[str, float], None],
        on_end: Callable[[EngineDeadError], None],
    ):
        self.ready = threading.Event()
        self.info: ModelInfo | None = None
        self.error: EngineDeadError | None = None
        self._on_progress = on_progress
        self._on_end = on_end
        self._lock = threading.Lock()
        self._handles: dict[int, GenerationHandle] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._unsent: list[Request] = []
        self._cause: str | None = None
        self._closing = Wakeup()
        self._is_closing = False
        self._sockets = sockets
        self._process = CoreProcess(settings)
        self._thread = threading.Thread(target=self._run, name="hfpaged-reports", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._handles)

    # ---- for callers, on any thread ----

    def submit(self, request: Request, handle: GenerationHandle) -> None:
        """Send a request and fill `handle` with what comes back.

        Raises:
            EngineDeadError, EngineBusyError: nothing was sent.
        """
        self._send_expecting(request, self._handles, handle)

    def ask(self, query: Request) -> Future[Any]:
        """Send a query; the future gets the answer, or the error.

        Raises:
            EngineDeadError, EngineBusyError: nothing was sent.
        """
        answer: Future[Any] = Future()
        self._send_expecting(query, self._answers, answer)
        return answer

    def tell(self, request: Request) -> None:
        """Send what must not get lost and needs no answer, now or as soon as there is room."""
        with self._lock:
            if self.error is None:
                self._unsent.append(request)
                self._send_waiting()

    def close(self) -> None:
        """End the process; whoever still waits gets EngineDeadError. Returns when it has ended."""
        self._is_closing = True
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send_expecting(self, request: Request, expected: dict[int, Any], receiver: Any) -> None:
        """Send a request whose reports go to `receiver`, which the reading thread must know before they can come."""
        with self._lock:
            expected[request.id] = receiver
            try:
                self._send(request)
            except HfpagedError:
                del expected[request.id]
                raise

    def _send(self, request: Request) -> None:
        """Send without waiting. Needs the lock."""
        if self.error is not None:
            raise self.error
        try:
            self._sockets.requests.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineBusyError("the engine's process is behind with reading requests; try again later") from None

    def _send_waiting(self) -> None:
        while self._unsent:
            try:
                self._send(self._unsent[0])
            except EngineBusyError:
                return
            self._unsent.pop(0)

    # ---- the reading thread ----

    def _run(self) -> None:
        try:
            self._read_until_end()
        except Exception as error:  # a thread that dies silently leaves every caller waiting
            logger.exception("hfpaged: reading the engine's reports failed")
            self._cause = f"its reports cannot be read ({error})"
        self._end()

    def _read_until_end(self) -> None:
        decoder = report_decoder()
        poller = zmq.Poller()
        poller.register(self._sockets.reports, zmq.POLLIN)
        poller.register(self._process.exited_fd, zmq.POLLIN)
        poller.register(self._closing.fileno(), zmq.POLLIN)
        while not self._is_closing:
            events = dict(poller.poll(POLL_MILLISECONDS))
            # What it said before it ended still counts, so this comes after the poll that saw it end.
            while self._sockets.reports.getsockopt(zmq.EVENTS) & zmq.POLLIN and not self._is_closing:
                self._take(decoder.decode(self._sockets.reports.recv()))
            if self._process.exited_fd in events:
                return
            with self._lock:
                self._send_waiting()

    def _take(self, report: Report) -> None:
        if isinstance(report, Progress):
            for output in report.outputs:
                self._deliver(output)
        elif isinstance(report, Reply):
            answer = self._answers.pop(report.id, None)
            if answer is not None:
                _settle(answer, report)
        elif isinstance(report, Loading):
            self._sockets.forget_files()
            self._on_progress(report.stage, report.fraction)
        elif isinstance(report, Ready):
            self.info = report.info
            self.ready.set()
        elif isinstance(report, Fatal):
            self._cause = f"{report.fault.kind}: {report.fault.message}"

    def _deliver(self, output: Output) -> None:
        handle = self._handles.get(output.id)
        if handle is None:
            return
        if output.queue_seconds is not None:
            handle.begin(handle.submitted_at + output.queue_seconds)
        if output.prompt_logprobs:
            handle.add_prompt_logprobs(output.prompt_logprobs)
        if output.tokens:
            handle.push(output.tokens, output.logprobs)
        if output.finish_reason is not None:
            # Before its reader knows, so that whoever counts requests after the end does not count this one.
            self._handles.pop(output.id, None)
            handle.finish(output.finish_reason, error_of(output.fault) if output.fault is not None else None)

    def _end(self) -> None:
        self._process.end(0.0 if self._process.has_exited else END_PATIENCE_SECONDS)
        error = EngineDeadError(f"the engine's process {self._reason()}")
        with self._lock:
            self.error = error
            handles, answers = list(self._handles.values()), list(self._answers.values())
            self._handles.clear()
            self._answers.clear()
            self._unsent.clear()
        self._sockets.close()
        self._closing.close()
        self._process.close()
        for handle in handles:
            handle.finish("error", error)
        for answer in answers:
            answer.set_exception(error)
        self.ready.set()
        self._on_end(error)

    def _reason(self) -> str:
        if self._cause is not None:
            return f"has ended: {self._cause}"
        return "was closed" if self._is_closing else self._process.how_it_ended()


def _settle(answer: Future[Any], reply: Reply) -> None:
    if reply.fault is not None:
        answer.set_exception(error_of(reply.fault))
    else:
        answer.set_result(reply.value)

"""EngineClient: an engine in another process, used as `hfpaged.engine(model)` is."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from hfpaged.config import EngineConfig
from hfpaged.errors import (
    EngineDeadError,
    ForkedEngineError,
    InputError,
    RequestTooLargeError,
    UnsupportedOptionError,
)
from hfpaged.generation.prompts import check_prompt, token_ids
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.serving.process.connection import Connection
from hfpaged.serving.process.messages import Cancel, ModelInfo, Query, QueryName, Submit, SubmitOptions
from hfpaged.serving.process.settings import CoreSettings
from hfpaged.serving.process.transport import ClientSockets, Transport

logger = logging.getLogger(__name__)

FIRST_RESTART_SECONDS = 0.5
LONGEST_RESTART_SECONDS = 30.0


class EngineClient:
    """Starts an engine in a process of its own and talks to it. All methods may be called from any thread.

    The process ends with this one, however that ends. When it dies, everybody who waits for it gets `EngineDeadError`
    at once.

    Args:
        model: directory or hub id; None: the default model.
        dtype: name of a torch dtype, or "auto" for the checkpoint's own.
        threads: CPU threads of the process; None: torch's choice.
        transport: "ipc" (Unix sockets in a private directory) or "tcp" (loopback, encrypted).
        restarts: how often a process that has died is replaced, after a pause that doubles each time.
        cpus: CPUs that the process stays on; None: all.
        on_progress: told (stage, fraction) while the model loads, on a thread of this object.
        engine_options: fields of `EngineConfig`.

    Raises:
        ConfigError: an option that does not exist or cannot work.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        threads: int | None = None,
        transport: Transport = "ipc",
        restarts: int = 0,
        cpus: Sequence[int] | None = None,
        on_progress: Callable[[str, float], None] | None = None,
        **engine_options: Any,
    ):
        EngineConfig.from_options(engine_options)
        self._model, self._dtype, self._threads, self._cpus = model, dtype, threads, cpus
        self._transport, self._engine_options = transport, engine_options
        self._restarts_left = restarts
        self._num_restarts = 0
        self._on_progress = on_progress or (lambda stage, fraction: None)
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection = self._connect()
        atexit.register(self.close)

    def __enter__(self) -> EngineClient:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- state ----

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and the process lives."""
        connection = self._connection
        return connection.info is not None and connection.error is None

    @property
    def is_loading(self) -> bool:
        """Whether the process lives and is not ready yet."""
        connection = self._connection
        return connection.info is None and connection.error is None

    @property
    def load_error(self) -> EngineDeadError | None:
        """Why the model could not be loaded, if so."""
        connection = self._connection
        return connection.error if connection.info is None else None

    @property
    def num_restarts(self) -> int:
        """How often the process has been replaced."""
        return self._num_restarts

    @property
    def num_running(self) -> int:
        """Requests of this client that have not ended."""
        return self._connection.num_running

    @property
    def pid(self) -> int:
        """Of the engine's process; it changes with a restart."""
        return self._connection.pid

    @property
    def info(self) -> ModelInfo:
        """Of the loaded model.

        Raises:
            EngineDeadError: the process has ended, or has not loaded the model yet.
        """
        return self._live_connection().info

    def wait_ready(self, timeout: float | None = None) -> ModelInfo:
        """Wait until the model is loaded.

        Raises:
            EngineDeadError: it could not be; the message has the cause.
            TimeoutError: it was not within `timeout` seconds (loading goes on).
        """
        connection = self._connection
        if not connection.ready.wait(timeout):
            raise TimeoutError(f"the model was not loaded within {timeout} s")
        if connection.error is not None:
            raise connection.error
        return connection.info

    def close(self) -> None:
        """End the process. Requests that still run end with EngineDeadError."""
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        self._closed.set()
        with self._lock:
            connection = self._connection
        connection.close()

    # ---- what an engine does ----

    def submit(
        self, prompt_ids: Sequence[int], *, hfpaged: dict[str, Any] | None = None, **options: Any
    ) -> GenerationHandle:
        """Queue one prompt and return at once.

        Args:
            prompt_ids: token ids, at least one.
            options: the fields of `SubmitOptions`, as `generate` has them; those that are code cannot leave a process.
            hfpaged: per-request options.

        Returns:
            A handle, as `engine.submit` does.

        Raises:
            InputError, UnsupportedOptionError, RequestTooLargeError, EngineBusyError, EngineDeadError: nothing was
                queued.
        """
        connection = self._live_connection()
        prompt = token_ids(prompt_ids)
        checked = checked_options(options if hfpaged is None else {**options, "hfpaged": hfpaged})
        _require_fits(prompt, checked, connection.info)
        handle = GenerationHandle(next(self._ids), len(prompt), self._cancel)
        connection.submit(Submit(handle.request_id, prompt, checked), handle)
        return handle

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name, see README."""
        return self.ask("stats").result()

    def check(self) -> None:
        """Raise `InvariantError` if the block books are inconsistent."""
        self.ask("check").result()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests are not disturbed."""
        self.ask("reset_prefix_cache").result()

    def release(self) -> None:
        """Free the KV pool; the next request builds it again. Requests that still run end with an error."""
        self.ask("release").result()

    async def ask_async(self, name: QueryName, timeout: float) -> Any:
        """The answer to one of the calls above without blocking the event loop.

        Raises:
            EngineDeadError, EngineBusyError: the process has ended, or does not read.
            TimeoutError: it does not answer.
        """
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.ask(name)), timeout)
        except asyncio.TimeoutError:  # another class before Python 3.11
            raise TimeoutError(f"the engine's process did not answer within {timeout} s") from None

    def ask(self, name: QueryName) -> Future[Any]:
        """Call a method of the engine in its process."""
        return self._live_connection().ask(Query(next(self._ids), name))

    def _cancel(self, handle: GenerationHandle) -> None:
        # To a new process the id means nothing, and then the handle has ended.
        self._connection.tell(Cancel(handle.request_id))

    # ---- processes ----

    def _live_connection(self) -> Connection:
        if self._pid != os.getpid():
            raise ForkedEngineError("this process was forked from the one that has the engine; make a client here")
        connection = self._connection
        if connection.error is not None:
            raise connection.error
        if connection.info is None:
            raise EngineDeadError("the engine's process has not loaded the model yet")
        return connection

    def _connect(self) -> Connection:
        sockets = ClientSockets(self._transport)
        settings = CoreSettings(
            model=self._model,
            addresses=sockets.addresses,
            parent=os.getpid(),
            dtype=self._dtype,
            threads=self._threads,
            engine_options=self._engine_options,
            cpus=list(self._cpus) if self._cpus is not None else None,
        )
        return Connection(settings, sockets, self._on_progress, self._on_end)

    def _on_end(self, error: EngineDeadError) -> None:
        """On the reading thread of a process that has ended: replace it if that is wanted."""
        if self._closed.is_set():
            return
        logger.error("hfpaged: %s", error)
        # What could not be loaded will not be loadable a second later.
        if self._restarts_left <= 0 or self._connection.info is None:
            return
        pause = min(LONGEST_RESTART_SECONDS, FIRST_RESTART_SECONDS * 2**self._num_restarts)
        if self._closed.wait(pause):
            return
        with self._lock:
            if not self._closed.is_set():
                self._restarts_left -= 1
                self._connection = self._connect()
                self._num_restarts += 1


def checked_options(options: dict[str, Any]) -> SubmitOptions:
    """Options for a message.

    Raises:
        UnsupportedOptionError: one that does not exist, cannot cross the boundary, or has an impossible value.
    """
    try:
        return msgspec.convert(options, SubmitOptions)
    except msgspec.ValidationError as error:
        raise UnsupportedOptionError(f"the engine's process does not take these options: {error}") from None


def _require_fits(prompt: list[int], options: SubmitOptions, info: ModelInfo) -> None:
    check_prompt(prompt, info.vocab_size)
    new_tokens = options.max_new_tokens if options.max_new_tokens is not msgspec.UNSET else 1
    if info.max_length is not None and len(prompt) >= info.max_length:
        raise InputError(f"the prompt has {len(prompt)} tokens; the model takes {info.max_length} with the answer")
    needed = -(-(len(prompt) + new_tokens) // info.block_size)
    if needed > info.num_blocks:
        raise RequestTooLargeError(needed, info.num_blocks)

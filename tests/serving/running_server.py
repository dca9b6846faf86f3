"""A server in this process, on a thread of its own, over an engine in another one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from transformers import PreTrainedTokenizerBase

from hfpaged.serving.api.server_state import ServerState
from hfpaged.serving.process.client import EngineClient
from hfpaged.serving.server import ServerLimits, create_app, make_state


@dataclass
class RunningServer:
    """What a test needs of it."""

    url: str
    state: ServerState
    app: Any


@contextlib.contextmanager
def running_server(
    client: EngineClient,
    tokenizer: PreTrainedTokenizerBase,
    limits: ServerLimits | None = None,
    tool_format: str | None = None,
    **app_options: Any,
) -> Iterator[RunningServer]:
    """Serve `client`'s model as "tiny" for the block."""
    state = make_state("tiny", client, tokenizer, tool_format, limits)
    app = create_app(state, **app_options)
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", state, app)
    finally:
        server.should_exit = True
        thread.join()

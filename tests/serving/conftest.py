"""A tiny model directory with a chat template, and an engine process that has loaded it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_directory import character_tokenizer, save_tiny
from transformers import AutoTokenizer, PreTrainedTokenizerBase

pytest.importorskip("zmq", reason="needs pip install 'hfpaged[serve]'")
pytest.importorskip("msgspec", reason="needs pip install 'hfpaged[serve]'")

from hfpaged.serving.process.client import EngineClient

CHAT_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}\n{% endif -%}"
    "{%- for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor -%}"
    "{#- <tool_call> -#}{%- if add_generation_prompt %}assistant: {% endif -%}"
)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return save_tiny(tmp_path_factory.mktemp("served-llama"), tokenizer, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def shared_client(model_directory: Path) -> Iterator[EngineClient]:
    """For tests that leave the process alive."""
    with EngineClient(str(model_directory), threads=1) as client:
        yield client


@pytest.fixture
def client(shared_client: EngineClient) -> Iterator[EngineClient]:
    yield shared_client
    assert eventually(lambda: idle(shared_client)), shared_client.stats()
    shared_client.check()


def idle(client: EngineClient) -> bool:
    """Whether no request runs and no block is held."""
    stats = client.stats()
    return stats["running"] == stats["waiting"] == 0 and stats["blocks_free"] == stats["blocks_total"]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def socket_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Where sockets are made in this test, and a function that lists what is there."""
    # Short, because a Unix socket's address is.
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: list(Path(folder).iterdir())


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_directory)


@pytest.fixture(scope="session")
def shared_server(shared_client: EngineClient, tokenizer: PreTrainedTokenizerBase) -> Iterator:
    """An HTTP server over the shared engine process."""
    for package in ("fastapi", "uvicorn", "httpx", "openai"):
        pytest.importorskip(package, reason="needs pip install 'hfpaged[serve]' openai")
    from serving.running_server import running_server

    with running_server(shared_client, tokenizer) as server:
        yield server


@pytest.fixture
def server(shared_server, client: EngineClient) -> Iterator:
    """The shared server; afterwards no text is open and no block is held."""
    yield shared_server
    assert eventually(lambda: shared_server.state.num_open == 0)

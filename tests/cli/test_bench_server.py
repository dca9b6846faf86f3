from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hfpaged.cli.bench.server import ServerFailure, percentile, run_server
from hfpaged.cli.bench.workload import BenchRequest
from hfpaged.cli.main import main
from hfpaged.errors import InputError

pytest.importorskip("httpx")


class FakeServer(BaseHTTPRequestHandler):
    """Streams as many tokens as asked, one less for prompts that begin with 99."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = body["max_tokens"] - (body["prompt"][0] == 99)
        events = [{"choices": [{"text": "x"}]}] * count + [{"choices": [], "usage": {"completion_tokens": count}}]
        self._send(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_is_timed(url: str) -> None:
    run = run_server(f"{url}/v1/", [BenchRequest([1], 5), BenchRequest([2], 3)], 2, None)
    assert [answer.tokens for answer in run.answers] == [5, 3]
    assert [len(answer.gaps) for answer in run.answers] == [4, 2]
    assert all(0 < answer.first <= answer.whole for answer in run.answers)
    assert "8 output tokens" in run.table()


def test_too_few_tokens_are_a_failure(url: str) -> None:
    with pytest.raises(ServerFailure, match="got 4 tokens, not 5"):
        run_server(url, [BenchRequest([99], 5)], 1, None)


def test_a_server_that_is_not_there_is_an_error_in_one_line() -> None:
    with pytest.raises(ServerFailure):
        run_server("http://127.0.0.1:9", [BenchRequest([1], 5)], 1, None)
    with pytest.raises(InputError):
        run_server("ftp://x", [BenchRequest([1], 5)], 1, None)


def test_the_command_prints_a_table(url: str, model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--url", url, "--model", str(model_directory), "--kind", "single"]
    assert main(arguments) == 0
    assert "time to first token" in capsys.readouterr().out


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(100)), 0.99) == 99

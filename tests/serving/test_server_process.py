"""`hfpaged serve` as a process: start, kill -9 of its engine, restart, drain on SIGTERM, user errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from serving.conftest import eventually

from hfpaged.cli.main import main
from hfpaged.serving.api.address import require_address

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="needs pip install 'hfpaged[serve]'")

ENDLESS = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}


class ServeProcess:
    """One `hfpaged serve` and its log."""

    def __init__(self, model: Path, folder: Path, *options: str):
        self.log = folder / "serve.log"
        self.url = "http://localhost"
        self.socket = str(folder / "http")
        command = [
            sys.executable,
            "-m",
            "hfpaged.cli.main",
            "serve",
            str(model),
            "--name",
            "tiny",
            "--uds",
            self.socket,
        ]
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        (folder / "tmp").mkdir()
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [*command, "--threads", "1", *options], stderr=log, stdout=log, env=environment
            )
        self.temporary = folder / "tmp"

    def http(self) -> httpx.Client:
        # Reading the certificates that TLS would need takes longer than a short request.
        return httpx.Client(transport=httpx.HTTPTransport(uds=self.socket, verify=False), base_url=self.url, timeout=60)

    def status(self) -> str:
        """What /health says."""
        try:
            with self.http() as http:
                return http.get("/health").json()["status"]
        except httpx.HTTPError:
            return "no answer"

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        return next(child for child in children if "hfpaged.serving.process.worker" in child.cmdline())

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture
def serve(model_directory: Path) -> Iterator:
    started = []
    # Short, because a Unix socket's address is.
    folder = tempfile.TemporaryDirectory(prefix="s")

    @contextlib.contextmanager
    def start(*options: str) -> Iterator[ServeProcess]:
        server = ServeProcess(model_directory, Path(folder.name), *options)
        started.append(server)
        assert eventually(lambda: server.status() == "ready" or server.popen.poll() is not None, 90), server.text()
        assert server.popen.poll() is None, server.text()
        yield server

    yield start
    for server in started:
        server.popen.kill()
        server.popen.wait()
    folder.cleanup()


def post(server: ServeProcess, body: dict, answers: list) -> None:
    with server.http() as http:
        if not body.get("stream"):
            answer = http.post("/v1/completions", json=body)
            answers.append((answer.status_code, answer.json()))
            return
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            answers.append((response.status_code, json.loads(lines[-1]) if lines[-1] != "[DONE]" else "done"))


def test_a_killed_engine_is_said_at_once_and_replaced(serve) -> None:
    with serve("--restarts", "1") as server:
        answers: list = []
        bodies = [{**ENDLESS, "stream": i % 2 == 0} for i in range(30)]
        clients = [threading.Thread(target=post, args=(server, body, answers)) for body in bodies]
        for client in clients:
            client.start()
        assert eventually(lambda: "hfpaged_running 30.0" in metrics(server), 20)
        first = server.engine()
        first.kill()
        began = time.monotonic()
        assert eventually(lambda: server.status() in ("dead", "loading"), 5)
        for client in clients:
            client.join(5)
        # Not when a request times out, after a minute.
        assert time.monotonic() - began < 10
        assert len(answers) == 30
        assert {status for status, _ in answers} == {200, 503}
        assert all(body["error"]["code"] == "engine_dead" for _, body in answers)
        assert has_ended(first)
        assert eventually(lambda: server.status() == "ready", 90)
        with server.http() as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        second = server.engine()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(20) == 0
        assert has_ended(second) and list(server.temporary.iterdir()) == []


def has_ended(process: psutil.Process) -> bool:
    """Whether it does nothing any more. Its entry may stay until whoever inherits it asks for its exit code."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def metrics(server: ServeProcess) -> str:
    with server.http() as http:
        return http.get("/metrics").text


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(serve) -> None:
    with serve() as server:
        answers: list = []
        client = threading.Thread(target=post, args=(server, {**ENDLESS, "stream": True, "max_tokens": 800}, answers))
        client.start()
        with server.http() as http:
            assert eventually(lambda: "hfpaged_running 1.0" in http.get("/metrics").text)
            server.popen.send_signal(signal.SIGTERM)
            refused = http.post("/v1/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert http.get("/health").status_code == 503
            assert http.get("/health/live").status_code == 200
        client.join(30)
        assert answers == [(200, "done")]
        assert server.popen.wait(20) == 0
        entries = [json.loads(line) for line in server.text().splitlines() if line.startswith("{")]
        finished = next(entry for entry in entries if entry.get("completion_tokens") == 800)
        assert finished["finish_reason"] == "length" and finished["prompt_tokens"] == len("hello")
        assert "Traceback" not in server.text()


def test_a_server_killed_with_its_requests_leaves_nothing(serve) -> None:
    with serve() as server:
        engine = server.engine()
        children = psutil.Process(server.popen.pid).children(recursive=True)
        threading.Thread(target=post_quietly, args=(server,), daemon=True).start()
        assert eventually(lambda: "hfpaged_running 1.0" in metrics(server))
        server.popen.kill()
        server.popen.wait()
        assert eventually(lambda: has_ended(engine))
        assert eventually(lambda: all(map(has_ended, children)))
        assert list(server.temporary.iterdir()) == []


def post_quietly(server: ServeProcess) -> None:
    with contextlib.suppress(httpx.HTTPError):
        post(server, ENDLESS, [])


def test_a_model_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hfpaged.cli.main", "serve", "no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert re.search("hfpaged: error: no/such/model is no directory", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "block_size"], "NAME=VALUE"),
        (["--engine", "blok_size=16"], "unknown engine option"),
        (["--engine", "block_size=0"], "block_size must be a positive integer"),
        (["--api-key-file", "no/such/file"], "cannot read the API key"),
        (["--host", "nonsense..name"], "cannot listen on nonsense..name:8000"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000: Cannot assign"),
        (["--uds", "no/such/folder/socket"], "cannot listen on no/such/folder/socket: No such file"),
        (["--uds", "x" * 200], "AF_UNIX path too long"),
    ],
)
def test_user_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", ".", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("hfpaged: error: ") and message in lines[0]


def test_a_taken_port_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert main(["serve", ".", "--port", str(taken)]) == 2
    assert capsys.readouterr().err == f"hfpaged: error: cannot listen on 127.0.0.1:{taken}: Address already in use\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "-1"),
        ("--port", "99999"),
        ("--port", "http"),
        ("--restarts", "-1"),
        ("--stall-seconds", "nan"),
        ("--template-seconds", "0"),
        ("--drain-seconds", "-1"),
    ],
)
def test_impossible_numbers_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", ".", option, value])
    assert stop.value.code == 2
    assert f"error: argument {option}: '{value}' is not " in capsys.readouterr().err


def test_an_address_that_was_tried_is_left_free(tmp_path: Path) -> None:
    require_address("localhost", 0, None)
    path = tmp_path / "socket"
    for _ in range(2):
        require_address("", 0, str(path))
        assert not path.exists()


def test_a_short_api_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HFPAGED_API_KEY", "hunter2")
    assert main(["serve", "."]) == 2
    assert "hunter2" not in capsys.readouterr().err

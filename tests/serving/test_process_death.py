"""Whichever side dies, the other ends cleanly: nobody waits, no process and no file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving.conftest import eventually

from hfpaged.errors import EngineDeadError
from hfpaged.serving.process.client import EngineClient

ENDLESS = {"max_new_tokens": 1500, "do_sample": False, "eos_token_id": -1}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_engine_fails_every_waiter_and_is_replaced(
    model_directory: Path, socket_directories: Callable[[], list[Path]]
) -> None:
    with EngineClient(str(model_directory), threads=1, restarts=1) as client:
        first = client.pid
        handles = [client.submit([5 + i], **ENDLESS) for i in range(30)]
        next(iter(handles[0]))
        errors: list[BaseException] = []
        waiters = [threading.Thread(target=collect_error, args=(handle, errors)) for handle in handles]
        for waiter in waiters:
            waiter.start()
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        for waiter in waiters:
            waiter.join(5)
        assert time.monotonic() - began < 10
        assert len(errors) == 30
        assert all(isinstance(error, EngineDeadError) and "SIGKILL" in str(error) for error in errors)
        assert client.num_running == 0
        assert not is_alive(first)
        assert eventually(lambda: client.num_restarts == 1)
        client.wait_ready(60)
        assert len(client.submit([5], max_new_tokens=3, eos_token_id=-1).result(10)) == 3
        second = client.pid
        assert second != first
    assert not is_alive(second)
    assert socket_directories() == []


def collect_error(handle, errors: list[BaseException]) -> None:
    try:
        handle.result(10)
    except BaseException as error:
        errors.append(error)


def test_closing_ends_running_requests_and_the_process(
    model_directory: Path, socket_directories: Callable[[], list[Path]]
) -> None:
    with EngineClient(str(model_directory), threads=1) as client:
        assert socket_directories() == [], "the files are gone as soon as both ends are connected"
        pid, handle = client.pid, client.submit([5], **ENDLESS)
    with pytest.raises(EngineDeadError, match="closed"):
        handle.result(5)
    assert not is_alive(pid)
    client.close()


START_AND_WAIT = """
import sys, time
from hfpaged.serving.process.client import EngineClient
client = EngineClient(sys.argv[1], threads=1)
if sys.argv[2] == "loaded":
    client.wait_ready()
    client.submit([5], max_new_tokens=1500, eos_token_id=-1)
print(client.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["loading", "loaded"])
def test_an_engine_does_not_outlive_a_killed_client(when: str, model_directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_WAIT, str(model_directory), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as frontend:
        pid = int(frontend.stdout.readline())
        if when == "loading":
            # Python is up and reads its settings; before that the process ends as soon as it tries.
            time.sleep(0.5)
        frontend.kill()
    assert eventually(lambda: not is_alive(pid), 10 if when == "loading" else 2)
    assert eventually(lambda: list(tmp_path.iterdir()) == [])

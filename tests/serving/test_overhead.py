"""What the front end costs: the core has a CPU of its own, the server and all clients share the other.

Slow, and meaningful on an idle machine only.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from hfpaged.serving.process.client import EngineClient

pytest.importorskip("uvicorn")

from serving.running_server import running_server

pytestmark = pytest.mark.slow

STREAMS = 50
TOKENS = 60
LARGEST_GROWTH = 1.05
LARGEST_DELAY_SECONDS = 0.015


@pytest.fixture(scope="module")
def cpus() -> Iterator[tuple[int, int]]:
    """(of the core, of everything else)"""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two CPUs")
    core, rest = sorted(before)[:2]
    os.sched_setaffinity(0, {rest})
    yield core, rest
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def smol(cpus: tuple[int, int], smollm2_path: Path) -> Iterator[EngineClient]:
    with EngineClient(str(smollm2_path), dtype="float32", threads=1, cpus=[cpus[0]]) as client:
        yield client


@pytest.fixture(scope="module")
def in_process(smollm2_path: Path, cpus: tuple[int, int]) -> dict[str, float]:
    """Seconds of a step and to the first token of the same engine, alone in a process on the core's CPU."""
    command = [sys.executable, "-c", IN_PROCESS, str(smollm2_path), str(cpus[0]), str(STREAMS), str(TOKENS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_streaming_clients_do_not_slow_the_core_down(
    in_process: dict[str, float], smol: EngineClient, smollm2_path: Path
) -> None:
    with running_server(smol, AutoTokenizer.from_pretrained(smollm2_path)) as server:
        streamed = []
        for _ in range(2):
            before = smol.stats()
            asyncio.run(_stream_all(server.url))
            streamed.append(step_seconds(before, smol.stats()))
    growth = min(streamed) / in_process["step"]
    print(
        f"step {in_process['step'] * 1e3:.2f} ms without clients, {min(streamed) * 1e3:.2f} ms with {STREAMS}: {growth}"
    )
    assert growth < LARGEST_GROWTH


def step_seconds(before: dict[str, float], after: dict[str, float]) -> float:
    """Mean time of the steps between two statistics, all that the stepping thread does included."""
    total = sum(after[name] - before[name] for name in ("seconds_schedule", "seconds_forward", "seconds_sample"))
    return total / (after["steps"] - before["steps"])


async def _stream_all(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=STREAMS)) as http:
        await asyncio.gather(*(_stream(http, [5 + i, 6, 7], TOKENS) for i in range(STREAMS)))


async def _stream(http: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> float:
    """Seconds to the first token of a streamed completion."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                json.loads(line[6:])
    return first


IN_PROCESS = """
import json, os, statistics, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
import torch; torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
import hfpaged
streams, tokens = int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval().patch()
engine = hfpaged.engine(model)
times = []
for i in range(30):
    began = time.perf_counter()
    handle = engine.submit([10 + i, 6, 7, 8], max_new_tokens=4, do_sample=False, eos_token_id=-1)
    next(iter(handle)); times.append(time.perf_counter() - began); handle.result()
steps = []
for turn in range(2):
    before = engine.stats()
    prompts = [[5 + i, 6, 7] for i in range(streams)]
    handles = [engine.submit(prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=-1) for prompt in prompts]
    for handle in handles:
        handle.result()
    after = engine.stats()
    names = ("seconds_schedule", "seconds_forward", "seconds_sample")
    steps.append(sum(after[name] - before[name] for name in names) / (after["steps"] - before["steps"]))
print(json.dumps({"step": min(steps), "first": statistics.median(times[5:])}))
"""


def test_the_first_token_comes_almost_as_soon_as_in_process(
    in_process: dict[str, float], smol: EngineClient, smollm2_path: Path
) -> None:
    async def served(url: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            times = [await _stream(http, [10 + i, 6, 7, 8], 4) for i in range(30)]
        return statistics.median(times[5:])

    with running_server(smol, AutoTokenizer.from_pretrained(smollm2_path)) as server:
        over_http = asyncio.run(served(server.url))
    print(f"first token: {in_process['first'] * 1e3:.1f} ms in process, {over_http * 1e3:.1f} ms over HTTP")
    assert over_http - in_process["first"] < LARGEST_DELAY_SECONDS

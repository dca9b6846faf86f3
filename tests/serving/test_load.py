"""Many streaming clients at once; some leave, some send garbage; nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable

import httpx
import psutil
import pytest
from families import build_tiny
from serving.conftest import eventually, idle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_TOKENS = 24
PROMPTS = [f"prompt number {i} " * (1 + i % 3) for i in range(12)]


@pytest.fixture(scope="module")
def expected(tokenizer: PreTrainedTokenizerBase, stock_greedy: Callable) -> list[str]:
    model: PreTrainedModel = build_tiny("llama", max_position_embeddings=2048)
    rows = [stock_greedy(model, tokenizer(prompt)["input_ids"], NUM_TOKENS) for prompt in PROMPTS]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


async def stream(http: httpx.AsyncClient, index: int, leave_after: int | None = None) -> str:
    """The text of one streamed completion, or of its first chunks."""
    body = {
        "model": "tiny",
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": NUM_TOKENS if leave_after is None else 1000,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                leave_after = None if leave_after is None else leave_after - 1
            if leave_after == 0:
                break
    return text


async def send_garbage(http: httpx.AsyncClient, number: int) -> None:
    body = (b"\xff" * 100, b"{", json.dumps({"model": "tiny", "prompt": 7}).encode())[number % 3]
    assert (await http.post("/v1/completions", content=body)).status_code == 400


async def crowd(url: str, size: int, expected: list[str]) -> None:
    """`size` clients at once: a third leave midway, one in 20 sends garbage, the rest check their text."""
    limits = httpx.Limits(max_connections=size)

    async def visit(number: int) -> None:
        if number % 20 == 7:
            await send_garbage(http, number)
        elif number % 3 == 0:
            await stream(http, number, leave_after=1 + number % 5)
        else:
            assert await stream(http, number) == expected[number % len(PROMPTS)]

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await asyncio.gather(*(visit(number) for number in range(size)))


def test_two_hundred_clients_do_not_disturb_each_other(server, expected: list[str]) -> None:
    asyncio.run(crowd(server.url, 200, expected))
    assert eventually(lambda: idle(server.state.client), 20)
    assert eventually(lambda: server.state.num_open == 0)
    server.state.client.check()


def test_a_reader_that_stops_reading_holds_nobody_up_and_is_cut_off(
    shared_client, tokenizer: PreTrainedTokenizerBase, expected: list[str]
) -> None:
    from serving.running_server import running_server

    from hfpaged.serving.server import ServerLimits

    with running_server(shared_client, tokenizer, ServerLimits(stall_seconds=1.0)) as server:
        asyncio.run(_with_stalled_reader(server, expected))
        assert eventually(lambda: idle(shared_client))


async def _with_stalled_reader(server, expected: list[str]) -> None:
    url = server.url
    host, port = url.removeprefix("http://").split(":")
    # As much text as the buffers of both sockets do not hold: many long answers in one response.
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
            "n": 32,
            "logprobs": 20,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    assert (await reader.read(100)).startswith(b"HTTP/1.1 200")
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert await asyncio.gather(*(stream(http, i) for i in range(12))) == expected
        # The stalled request is still there, and then it is cut off, although its client never left.
        assert await asyncio.to_thread(eventually, lambda: server.state.num_open == 32)
        assert await asyncio.to_thread(eventually, lambda: server.state.num_open == 0, 60)
    writer.transport.abort()


def processes_rss(server) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in (psutil.Process().pid, server.state.client.pid))


def soak(server, expected: list[str], seconds: float) -> None:
    """Crowds one after the other; memory must be flat once everything has been used."""
    deadline = time.monotonic() + seconds
    levels = []
    for _ in itertools.count():
        asyncio.run(crowd(server.url, 200, expected))
        levels.append(processes_rss(server))
        if time.monotonic() > deadline and len(levels) >= 3:
            break
    assert eventually(lambda: idle(server.state.client), 20)
    server.state.client.check()
    settled = levels[len(levels) // 3]
    print(f"soak: {len(levels)} crowds, RSS {[level >> 20 for level in levels]} MiB")
    assert levels[-1] - settled < 48 << 20, [level >> 20 for level in levels]


def test_memory_is_flat_under_a_few_crowds(server, expected: list[str]) -> None:
    soak(server, expected, 8)


@pytest.mark.slow
def test_memory_is_flat_under_load(server, expected: list[str]) -> None:
    soak(server, expected, 600)

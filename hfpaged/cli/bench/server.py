"""Time an OpenAI-compatible server over one workload: latency as clients see it, and throughput."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpaged.cli.bench.workload import BenchRequest
from hfpaged.errors import HfpagedError, InputError, MissingDependencyError

LONGEST_REASON = 300
SECONDS = 3600


class ServerFailure(HfpagedError):
    """The server cannot be reached, or did not answer a request as asked."""


@dataclass
class Answer:
    """One streamed completion: seconds to its first text, between two pieces, and to its end."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    tokens: int = 0


@dataclass
class ServerRun:
    """All answers of one turn, and the seconds it took."""

    answers: list[Answer]
    seconds: float

    def table(self) -> str:
        """A latency and throughput table."""
        tokens = sum(answer.tokens for answer in self.answers)
        rows = [
            ("time to first token", [answer.first for answer in self.answers]),
            ("between tokens", [gap for answer in self.answers for gap in answer.gaps]),
            ("whole request", [answer.whole for answer in self.answers]),
        ]
        lines = [f"{'':22}{'median':>10}{'p90':>10}{'p99':>10}{'max':>10}   milliseconds"]
        for name, values in rows:
            numbers = "".join(f"{percentile(values, share) * 1000:>10.1f}" for share in (0.5, 0.9, 0.99, 1.0))
            lines.append(f"{name:<22}{numbers}")
        lines.append(f"{len(self.answers)} requests, {tokens} output tokens in {self.seconds:.2f} s")
        lines.append(f"{tokens / self.seconds:.1f} output tokens/s, {len(self.answers) / self.seconds:.2f} requests/s")
        return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values are not above; 0 without values."""
    if not values:
        return 0.0
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run_server(url: str, work: Sequence[BenchRequest], concurrency: int, api_key: str | None) -> ServerRun:
    """Send the workload, so many requests at a time, each streamed, greedy and as long as asked.

    Args:
        url: address of the server, with or without /v1.

    Raises:
        ServerFailure: it cannot be reached, or refuses a request.
    """
    try:
        import httpx
    except ImportError as error:
        raise MissingDependencyError("hfpaged bench --url needs httpx: pip install httpx") from error
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise InputError(f"--url takes http://... or https://..., got {url!r}")

    async def run() -> ServerRun:
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=SECONDS, limits=limits) as http:
            model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            turn = asyncio.Semaphore(concurrency)

            async def one(request: BenchRequest) -> Answer:
                async with turn:
                    return await _stream(http, model, request)

            await one(BenchRequest([5, 6, 7], 4))
            began = time.perf_counter()
            answers = await asyncio.gather(*(one(request) for request in work))
            return ServerRun(list(answers), time.perf_counter() - began)

    try:
        return asyncio.run(run())
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        reason = str(error) or type(error).__name__
        raise ServerFailure(f"{url}: {reason[:LONGEST_REASON]}") from error


async def _stream(http: Any, model: str, request: BenchRequest) -> Answer:
    body = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, began = Answer(), time.perf_counter()
    last = began
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ServerFailure(f"status {response.status_code}: {text[:LONGEST_REASON]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if "error" in event:
                raise ServerFailure(str(event["error"].get("message"))[:LONGEST_REASON])
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                _note_piece(answer, now, began, last)
                last = now
    answer.whole = time.perf_counter() - began
    if answer.tokens != request.max_new_tokens:
        raise ServerFailure(f"a request got {answer.tokens} tokens, not {request.max_new_tokens}")
    return answer


def _note_piece(answer: Answer, now: float, began: float, last: float) -> None:
    if not answer.first:
        answer.first = now - began
    else:
        answer.gaps.append(now - last)

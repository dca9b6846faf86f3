"""Metrics: what Prometheus is shown. Times are taken here, totals and gauges come from the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hfpaged.serving.api.generation import Generation

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

GAUGES = {
    "running": "Requests in the engine's steps",
    "waiting": "Requests in the engine's queue",
    "blocks_total": "KV blocks",
    "blocks_free": "KV blocks that nobody holds",
    "blocks_cached": "Free KV blocks that still have a prefix",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_prompt_tokens": "Prompt tokens that came out of the prefix cache",
    "generated_tokens": "Tokens generated",
    "preemptions_swap": "Requests whose blocks went to the host",
    "preemptions_recompute": "Requests whose blocks were dropped, to be computed again",
    "steps": "Steps of the engine",
    "failed_steps": "Steps that failed",
}


class Metrics:
    """One server's. Nothing in it is global."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._stats: dict[str, Any] = {}
        self._registry.register(self)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to first token", SECONDS
        )
        self.inter_token = self._histogram("inter_token_seconds", "Between tokens of a text", TOKEN_SECONDS)
        self.queue = self._histogram("queue_seconds", "From arrival in the engine to its first step", SECONDS)
        self.request = self._histogram("request_seconds", "From submission to the end of the text", SECONDS)
        self.responses = Counter(
            "hfpaged_responses", "Responses by path and status", ("path", "status"), registry=self._registry
        )
        self.finished = Counter(
            "hfpaged_finished", "Texts by reason for their end", ("reason",), registry=self._registry
        )

    def observe(self, generations: Sequence[Generation], now: float) -> None:
        """Count texts that have ended, however."""
        for generation in generations:
            handle = generation.handle
            self.finished.labels(generation.finish_reason or handle.finish_reason or "cancelled").inc()
            self.request.observe(now - handle.submitted_at)
            if handle.started_at is not None:
                self.queue.observe(handle.started_at - handle.submitted_at)
            if generation.first_token_at is not None:
                self.time_to_first_token.observe(generation.first_token_at - handle.submitted_at)
            for seconds, count in generation.gaps:
                for _ in range(count):
                    self.inter_token.observe(seconds)

    def render(self, stats: dict[str, Any]) -> bytes:
        """All metrics as text, with the engine's from these statistics; {} if it gives none."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics, for the registry."""
        if not self._stats:
            return
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"hfpaged_{name}", text, self._stats[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"hfpaged_{name}", text, self._stats[name])
        total = self._stats["blocks_total"]
        used = (total - self._stats["blocks_free"]) / total if total else 0.0
        yield GaugeMetricFamily("hfpaged_kv_usage", "Share of the KV blocks that requests hold", used)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"hfpaged_{name}", text, buckets=buckets, registry=self._registry)

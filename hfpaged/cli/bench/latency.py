"""When the tokens of each request arrived: time to the first one, and between one and the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 99)


@dataclass
class TokenTimes:
    """One request, in seconds of one clock.

    Attributes:
        submitted: when it was handed to the engine.
        arrivals: when each token was there.
    """

    submitted: float
    arrivals: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Latency:
    """Milliseconds by percentile, over all requests of a turn.

    Attributes:
        first: from submission to the first token.
        between: from a token to the next of the same request; empty where no request has two.
    """

    first: dict[int, float]
    between: dict[int, float]

    @classmethod
    def of(cls, requests: Sequence[TokenTimes]) -> Latency:
        """Percentiles of requests that have at least one token each."""
        first = [request.arrivals[0] - request.submitted for request in requests]
        between = [gap for request in requests for gap in np.diff(request.arrivals)]
        return cls(_percentiles(first), _percentiles(between))


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    if not seconds:
        return {}
    return {percent: round(1e3 * float(np.percentile(seconds, percent)), 3) for percent in PERCENTILES}


def latency_table(rows: Sequence[tuple[str, Latency]]) -> str:
    """One line an engine."""
    names = [f"{what} p{percent}" for what in ("first token", "next token") for percent in PERCENTILES]
    lines = [f"{'engine, ms':<12}" + "".join(f"{name:>17}" for name in names)]
    for engine, latency in rows:
        values = [part.get(percent) for part in (latency.first, latency.between) for percent in PERCENTILES]
        lines.append(f"{engine:<12}" + "".join(f"{'-' if value is None else f'{value:.1f}':>17}" for value in values))
    return "\n".join(lines)

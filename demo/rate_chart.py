"""Tokens a second over the last minute, as an SVG."""

from __future__ import annotations

import itertools
from collections import deque

SECONDS = 60
WIDTH, HEIGHT = 480, 84


class RateHistory:
    """A count that grows, seen at irregular times, as its rate in each of the last `SECONDS` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """The count at a time; times ascend."""
        self._seen.append((now, count))
        # One point older than the window stays: the first rate begins there.
        while len(self._seen) > 2 and self._seen[1][0] < now - SECONDS:
            self._seen.popleft()

    def rates(self, now: float) -> list[float]:
        """`SECONDS` rates, the last second's at the end."""
        edges = [now - SECONDS + at for at in range(SECONDS + 1)]
        counts = [self._count_at(edge) for edge in edges]
        return [after - before for before, after in itertools.pairwise(counts)]

    def _count_at(self, time: float) -> float:
        """The count, interpolated between the two times at which it was seen around `time`."""
        before = None
        for seen, count in self._seen:
            if seen >= time:
                if before is None:
                    return count
                share = (time - before[0]) / (seen - before[0])
                return before[1] + share * (count - before[1])
            before = (seen, count)
        return before[1] if before else 0.0


def rate_chart(rates: list[float]) -> str:
    """An area chart with its highest value written at the top."""
    top = max(10.0, *rates)
    step = WIDTH / (len(rates) - 1)
    points = [f"{index * step:.1f} {HEIGHT - rate / top * (HEIGHT - 4):.1f}" for index, rate in enumerate(rates)]
    line = "L".join(points)
    label = f"now {rates[-1]:.0f} tokens a second, at most {max(rates):.0f} in the last minute"
    return (
        f'<figure class="hp-chart"><span class="hp-axis">{top:,.0f} tokens/s</span>'
        f'<svg role="img" aria-label="{label}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f'<path class="area" d="M0 {HEIGHT}L{line}L{WIDTH} {HEIGHT}z"/><path class="line" d="M{line}"/></svg>'
        f"<figcaption><span>{SECONDS} s ago</span><span>now</span></figcaption></figure>"
    )

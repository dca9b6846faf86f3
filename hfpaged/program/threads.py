"""How many threads a step uses: what the process may use, what the step is worth, and what has proved fast lately.

Threads in lock step are only as fast as the slowest core. Where another process takes half of one core, all wait for
it, and fewer threads are faster; this cannot be known beforehand, so it is tried: now and then one step runs on another
number of threads, and the faster number stays.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

MIN_THREAD_SECONDS = 40e-6  # a thread is woken for this much work at least
# Rough speeds of one thread, to tell small steps from large ones.
_BYTES_PER_SECOND = 2e10
_MULTIPLY_ADDS_PER_SECOND = 7e10
_CGROUP = Path("/sys/fs/cgroup")

_SMOOTHING = 0.1  # weight of the newest time
_GAIN = 0.93  # another number of threads takes over below this fraction of the present one's time
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 128  # steps between two trials: doubled when a trial changed nothing
_SURPRISE = 1.5  # a step this much slower than usual asks for a trial soon


def single_thread_seconds(num_bytes: int, multiply_adds: int) -> float:
    """Rough time that one thread takes to read that much and compute that much, whichever is longer."""
    return max(num_bytes / _BYTES_PER_SECOND, multiply_adds / _MULTIPLY_ADDS_PER_SECOND)


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may run on, and no more than its CPU quota, rounded up, pays for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs' worth of time that the control group grants, by cgroup v2 or v1. None: no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:
        return None


@dataclass
class _SizeClass:
    """What is known about steps of about the same number of tokens."""

    threads: int
    seconds: dict[int, float] = field(default_factory=dict)  # threads -> smoothed seconds per estimated second
    interval: int = _FIRST_INTERVAL
    steps_to_trial: int = 2
    upward: bool = False


class ThreadPolicy:
    """Picks the number of threads of each step, and learns from how long the steps took.

    Attributes:
        limit: most threads of any step.
    """

    def __init__(self, limit: int, min_thread_seconds: float = MIN_THREAD_SECONDS):
        self.limit = limit
        self._min_thread_seconds = min_thread_seconds
        self._classes: dict[int, _SizeClass] = {}

    def choose(self, estimate: float) -> int:
        """Threads for a step that would take about `estimate` seconds on one of them."""
        if not self._min_thread_seconds:
            return self.limit
        worth = max(1, min(self.limit, int(estimate / self._min_thread_seconds)))
        if worth == 1:
            return 1
        size_class = self._class_of(estimate)
        return min(worth, self._trial(size_class) if size_class.steps_to_trial <= 0 else size_class.threads)

    def record(self, estimate: float, threads: int, seconds: float) -> None:
        """A step of that estimate took `seconds` on `threads` threads."""
        if not self._min_thread_seconds or int(estimate / self._min_thread_seconds) <= 1:
            return
        size_class, ratio = self._class_of(estimate), seconds / estimate
        usual = size_class.seconds.get(threads)
        size_class.seconds[threads] = ratio if usual is None else usual + _SMOOTHING * (ratio - usual)
        if threads == size_class.threads:
            size_class.steps_to_trial -= 1
            if usual is not None and ratio > _SURPRISE * usual:
                size_class.interval = _FIRST_INTERVAL
                size_class.steps_to_trial = min(size_class.steps_to_trial, _FIRST_INTERVAL)
            return
        self._judge_trial(size_class, threads)

    def _class_of(self, estimate: float) -> _SizeClass:
        # A factor of four: single decodes, small batches, large batches and prompt chunks are apart.
        key = int(math.log2(estimate) // 2)
        if key not in self._classes:
            self._classes[key] = _SizeClass(self.limit)
        return self._classes[key]

    def _trial(self, size_class: _SizeClass) -> int:
        """Half as many threads again, or a third fewer; the other direction next time."""
        now = size_class.threads
        up, down = min(self.limit, now + max(1, now // 2)), max(1, now - max(1, now // 3))
        return (up if size_class.upward else down) if up > now > down else up if up > now else down

    def _judge_trial(self, size_class: _SizeClass, tried: int) -> None:
        present = size_class.seconds.get(size_class.threads, math.inf)
        if size_class.seconds[tried] < _GAIN * present:
            size_class.threads = tried
            size_class.interval = _FIRST_INTERVAL
        else:
            size_class.upward = not size_class.upward
            size_class.interval = min(2 * size_class.interval, _LAST_INTERVAL)
        # Old times of the others say little about how busy the machine is when they are tried next.
        size_class.seconds = {n: t for n, t in size_class.seconds.items() if n == size_class.threads}
        size_class.steps_to_trial = size_class.interval

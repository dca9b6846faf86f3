"""How much of the machine other processes took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

# A reading above this means a time that another run may not repeat.
DISTURBED_CORES = 0.1

# The kernel counts in ticks of 10 ms, so a shorter measurement says nothing.
SHORTEST_SECONDS = 0.5


def is_disturbed(foreign_cores: float | None) -> bool:
    """Whether a reading says that other processes may have changed the time."""
    return foreign_cores is not None and foreign_cores > DISTURBED_CORES


class CpuMeter:
    """Mean number of cores that processes other than this one kept busy since the meter was made."""

    def __init__(self) -> None:
        self._start = (time.perf_counter(), _machine_busy_seconds(), _own_seconds())

    def foreign_cores(self) -> float | None:
        """In cores, at least 0. None in the first half second, and where the system does not tell (no /proc/stat)."""
        start, busy, own = self._start
        now = _machine_busy_seconds()
        elapsed = time.perf_counter() - start
        if busy is None or now is None or elapsed < SHORTEST_SECONDS:
            return None
        return max(0.0, ((now - busy) - (_own_seconds() - own)) / elapsed)


def _machine_busy_seconds() -> float | None:
    """CPU seconds of all cores since boot that were neither idle nor waiting for a disk."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system

"""CpuLoad: how many of this process's CPUs other processes leave to it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Columns of a CPU's line there, in ticks: see proc_stat(5). Guests are in `user` and `nice` already.
_USER, _NICE, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL = 0, 1, 2, 5, 6, 7
# Seconds between two readings: a tick may be 10 ms long, and what was long ago says nothing.
_SHORTEST, _LONGEST = 0.1, 10.0
# A thread that finds this much of a CPU is worth trying.
_PART = 0.4


@dataclass(frozen=True)
class _Reading:
    """The CPUs that this process may use.

    Attributes:
        clock: when, in seconds.
        busy: seconds that they all have been busy.
        own: seconds of it with this process.
        cpus: how many they are.
    """

    clock: float
    busy: float
    own: float
    cpus: int


class CpuLoad:
    """Compares readings of the kernel's counters. Linux; elsewhere nobody can tell.

    Args:
        stat: the counters, in the format of /proc/stat.
    """

    def __init__(self, stat: Path = _STAT):
        self._stat = stat
        self._last: _Reading | None = None

    def has_room(self, threads: int) -> bool | None:
        """Whether so many threads of this process would find a CPU each, by what other processes took lately.

        Processes of lower priority do not count. Returns None where that is not known yet: ask again after a while.
        True where nobody can tell.
        """
        now, last = self._read(), self._last
        if now is None:
            return True
        if last is not None and now.clock - last.clock < _SHORTEST:
            return None
        self._last = now
        if last is None or now.clock - last.clock > _LONGEST:
            return None
        others = (now.busy - last.busy - (now.own - last.own)) / (now.clock - last.clock)
        return now.cpus - max(0.0, others) >= threads - 1 + _PART

    def _read(self) -> _Reading | None:
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        allowed = os.sched_getaffinity(0)
        names = {f"cpu{cpu}" for cpu in allowed}
        columns = [_USER, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL]
        if os.getpriority(os.PRIO_PROCESS, 0) > 0:
            columns.append(_NICE)
        rows = [fields[1:] for line in lines if (fields := line.split()) and fields[0] in names]
        ticks = sum(int(row[column]) for row in rows for column in columns)
        return _Reading(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), len(allowed))

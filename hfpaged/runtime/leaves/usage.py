"""CpuUsage: whether the threads of a step had the CPU while they had work."""

from __future__ import annotations


class CpuUsage:
    """Adds up calls that ran on several threads. Those on one thread, and the code between calls, tell nothing."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A step begins."""
        self._thread_seconds = self._cpu_seconds = 0.0

    def add(self, seconds: float, threads: int, cpu_seconds: float) -> None:
        """A call took `seconds` on so many threads, which had the CPU for `cpu_seconds` together."""
        if threads > 1:
            self._thread_seconds += seconds * threads
            self._cpu_seconds += cpu_seconds

    @property
    def had_cpu(self) -> float:
        """The part of their time in which the threads had the CPU; 0 if there were no such calls."""
        return self._cpu_seconds / self._thread_seconds if self._thread_seconds else 0.0

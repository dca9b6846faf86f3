"""How many threads a step uses: what the process may use, what the step is worth, and what has proved fast lately.

Threads in lock step are only as fast as the slowest core. Where another process takes half of one core, all wait for
it, and fewer threads are faster; this cannot be known beforehand, so it is tried: now and then one step runs on another
number of threads, and the faster number stays. While the present threads are given all the time that they can use,
fewer would not be faster and are not tried: with two of them a trial costs the time of a whole step. Nor are more tried
for which other processes leave no CPU, but for once in a long while, as that does not say who would yield.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from hfpaged.program.cpu_load import CpuLoad

MIN_THREAD_SECONDS = 40e-6  # a thread is woken for this much work at least
# Rough speeds of one thread, to tell small steps from large ones.
_BYTES_PER_SECOND = 2e10
_MULTIPLY_ADDS_PER_SECOND = 7e10
_CGROUP, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_USUAL, _RECENT = 0.05, 0.2  # weights of the newest time in two running means
_GAIN = 0.93  # another number of threads takes over below this fraction of the present one's time
_FIRST_INTERVAL, _LAST_INTERVAL = 8, 128  # steps between two trials: doubled when a trial changed nothing
_MOST_TRIED = 4.0  # the steps between trials grow with what a trial costs, up to this many steps' time
_SURPRISE = 1.5  # times recently this much longer than usual ask for a trial soon
_UNDISTURBED = 0.85  # of the time that threads take, they had the CPU
_MOST_PUT_OFF = 64  # times that a trial of more threads is put off while there seems to be no CPU for them
_CONFIRMATIONS = 2  # steps in which another number of threads has to prove faster


def single_thread_seconds(num_bytes: int, multiply_adds: int) -> float:
    """Rough time that one thread takes to read that much and compute that much, whichever is longer."""
    return max(num_bytes / _BYTES_PER_SECOND, multiply_adds / _MULTIPLY_ADDS_PER_SECOND)


def usable_cpus(cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """CPUs that this process may run on, and no more than its CPU quota, rounded up, pays for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _control_groups(cgroup, membership) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([allowed, *map(math.ceil, quotas)]))


def _control_groups(cgroup: Path, membership: Path) -> set[Path]:
    """Folders of the control groups, of cgroup v2 or v1, that this process is in: its own and all around it."""
    roots = {"": cgroup, "cpu": cgroup / "cpu"}
    folders = set(roots.values())
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in roots:
                # Inside a container the path may be the host's, and the root is the container's own group.
                inner = Path(path.lstrip("/"))
                folders |= {roots[controller] / part for part in (inner, *inner.parents)}
    return folders


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time that a control group grants. None: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:
        return None


class _SizeClass:
    """What is known about steps of about the same number of tokens. Times are seconds by estimated second.

    Attributes:
        threads: that such steps use now.
    """

    def __init__(self, limit: int):
        self.threads = limit
        self._limit = limit
        self._usual = self._recent = 0.0
        self._had_cpu = 0.0  # recent part of their time that the threads had the CPU; 0: not known
        self._steps = 0  # that these two are means of, the last ones mostly
        self._interval = _FIRST_INTERVAL
        self._steps_to_trial = 3  # the first ones pay for memory that is used for the first time
        self._upward = False
        self._put_off = 0  # times in a row
        self._tried: list[float] = []  # times on `trial()` threads, in the trial that is on

    @property
    def is_undisturbed(self) -> bool:
        """Whether the threads of such steps have lately had the CPU for almost all of their time."""
        return self._had_cpu > _UNDISTURBED

    @property
    def in_trial(self) -> bool:
        """Whether the next step is to run on `trial()` threads."""
        return self._steps_to_trial <= 0 and self.trial() != self.threads

    @property
    def may_put_off(self) -> bool:
        """Whether the trial that is due may wait: one of more threads, not begun, that has not waited too often."""
        return self.trial() > self.threads and not self._tried and self._put_off < _MOST_PUT_OFF

    def put_off(self) -> None:
        """Try some steps later."""
        self._put_off += 1
        self._steps_to_trial = _FIRST_INTERVAL

    def trial(self) -> int:
        """Half as many threads again, or a third fewer; the other direction next time. `threads`: no trial is due."""
        now = self.threads
        up, down = min(self._limit, now + max(1, now // 2)), max(1, now - max(1, now // 3))
        if self.is_undisturbed:
            down = now
        others = [count for count in (up, down) if count != now] or [now]
        return others[0 if self._upward else -1]

    def record(self, time: float, had_cpu: float) -> None:
        """A step on `threads` threads took this time, and they had the CPU for that part of it."""
        self._steps_to_trial -= 1
        self._steps += 1
        self._had_cpu += max(_RECENT, 1 / self._steps) * (had_cpu - self._had_cpu)
        self._usual += max(_USUAL, 1 / self._steps) * (time - self._usual)
        self._recent += max(_RECENT, 1 / self._steps) * (time - self._recent)
        if self._steps == 1 and 0 < had_cpu < _UNDISTURBED:
            self._steps_to_trial = 0
        # More threads than free cores: the ones that wait for a core hold up all. One thread cannot do with fewer.
        if self.threads > 1 and self._recent > _SURPRISE * self._usual:
            self._usual = self._recent
            self._upward = False
            self._wait(_FIRST_INTERVAL, steps=2)

    def record_trial(self, time: float) -> None:
        """A step on `trial()` threads took this time. One fast step may be luck, so a trial lasts until it is slow."""
        self._tried.append(time)
        mean = sum(self._tried) / len(self._tried)
        if mean >= _GAIN * self._usual:
            self._end_trial(mean)
            self._upward = not self._upward
        elif len(self._tried) == _CONFIRMATIONS:
            self.threads = self.trial()
            self._usual = self._recent = mean
            self._wait(_FIRST_INTERVAL, steps=_FIRST_INTERVAL)

    def _end_trial(self, time: float) -> None:
        lost_steps = min(time / self._usual - 1, _MOST_TRIED)
        self._wait(min(2 * self._interval, _LAST_INTERVAL), round(self._interval * max(1, lost_steps)))

    def _wait(self, interval: int, steps: int) -> None:
        self._interval = interval
        self._steps_to_trial = steps
        self._put_off = 0
        self._tried = []


class ThreadPolicy:
    """Picks the number of threads of each step, and learns from how long the steps took.

    Args:
        min_thread_seconds: work that is worth another thread; 0 always uses all.
        has_room: whether so many threads would find a CPU each, see `CpuLoad.has_room`, which is the default.

    Attributes:
        limit: most threads of any step.
    """

    def __init__(
        self,
        limit: int,
        min_thread_seconds: float = MIN_THREAD_SECONDS,
        has_room: Callable[[int], bool | None] | None = None,
    ):
        self.limit = limit
        self._min_thread_seconds = min_thread_seconds
        self._has_room = has_room or CpuLoad().has_room
        self._classes: dict[int, _SizeClass] = {}

    def choose(self, estimate: float) -> int:
        """Threads for a step that would take about `estimate` seconds on one of them."""
        if not self._min_thread_seconds:
            return self.limit
        size_class = self._class_of(estimate)
        if size_class.in_trial and size_class.may_put_off and not self._has_room(size_class.trial()):
            size_class.put_off()
        return size_class.trial() if size_class.in_trial else size_class.threads

    def can_split_rows(self, estimate: float) -> bool:
        """Whether a step of that estimate may give each thread rows of its own.

        That is fastest while all threads have the CPU. Beside a busy process one would be alone with its rows for long,
        whereas threads that share every operation take over from each other.
        """
        return not self._min_thread_seconds or self._class_of(estimate).is_undisturbed

    def record(self, estimate: float, seconds: float, had_cpu: float = 0.0) -> None:
        """A step of that estimate took `seconds` on the threads that `choose` said.

        Args:
            had_cpu: the part of the time that they had work for which they had the CPU; 0 where that is not known.
        """
        if not self._min_thread_seconds:
            return
        size_class = self._class_of(estimate)
        if size_class.in_trial:
            size_class.record_trial(seconds / estimate)
        else:
            size_class.record(seconds / estimate, had_cpu)

    def _class_of(self, estimate: float) -> _SizeClass:
        # A factor of four: single decodes, small batches, large batches and prompt chunks are apart.
        key = int(math.log2(estimate) // 2)
        if key not in self._classes:
            middle = 2.0 ** (2 * key + 1)
            self._classes[key] = _SizeClass(max(1, min(self.limit, int(middle / self._min_thread_seconds))))
        return self._classes[key]

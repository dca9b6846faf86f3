"""What other processes leave of the CPUs, by counters that a test writes, and by those of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hfpaged.program.cpu_load import CpuLoad

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Four CPUs of which the process may use the first three."""

    def __init__(self, folder, monkeypatch):
        self.stat = folder / "stat"
        self.ticks = [[0] * 10 for _ in range(4)]
        self.clock = self.own = 5.0
        monkeypatch.setattr(time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(time, "process_time", lambda: self.own)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
        monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
        self.run(0.0)

    def run(self, seconds: float, own: float = 0.0, **busy: float) -> None:
        """Time goes by, of which this process and others have so many CPUs: `user_0` is user time of CPU 0."""
        self.clock += seconds
        self.own += own * seconds
        self.ticks[0][0] += round(own * seconds * TICKS)
        for name, part in busy.items():
            column, cpu = name.split("_")
            column = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"].index(column)
            self.ticks[int(cpu)][column] += round(part * seconds * TICKS)
        rows = [f"cpu{cpu} {' '.join(map(str, row))}" for cpu, row in enumerate(self.ticks)]
        self.stat.write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *rows, "intr 8", ""]))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def rooms(machine, own=0.5, **busy):
    """The most threads that have room after a second of such load."""
    loads = [CpuLoad(machine.stat) for _ in range(4)]
    assert [load.has_room(1) for load in loads] == [None] * 4
    machine.run(1.0, own, **busy)
    return sum(load.has_room(threads) for threads, load in enumerate(loads, start=1))


@pytest.mark.parametrize(
    "busy, own, free",
    [
        ({}, 0.5, 3),
        ({}, 1.0, 3),
        ({"idle_1": 1.0, "iowait_2": 1.0}, 1.0, 3),
        ({"user_1": 1.0}, 1.0, 2),
        ({"user_1": 0.5}, 0.5, 3),
        ({"user_1": 0.5, "system_2": 0.5}, 0.5, 2),
        ({"steal_0": 0.4, "irq_1": 0.4, "softirq_2": 0.4}, 0.1, 2),
        ({"user_3": 1.0}, 0.5, 3),
        ({"nice_1": 1.0}, 0.5, 3),
    ],
    ids=str,
)
def test_room_is_what_others_leave_of_the_allowed_cpus(machine, busy, own, free):
    assert rooms(machine, own, **busy) == free


def test_a_process_of_low_priority_counts_others_of_low_priority(machine, monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda which, who: 5)
    assert rooms(machine, nice_1=1.0) == 2


def test_it_is_not_known_at_once_nor_from_long_ago(machine):
    load = CpuLoad(machine.stat)
    assert load.has_room(2) is None
    machine.run(0.01)
    assert load.has_room(2) is None
    machine.run(0.5)
    assert load.has_room(2) is True
    machine.run(100.0)
    assert load.has_room(2) is None
    machine.run(0.5, user_0=1, user_1=1, user_2=1)
    assert load.has_room(2) is False


def test_where_nobody_can_tell_there_is_room(tmp_path):
    assert CpuLoad(tmp_path / "missing").has_room(64) is True


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="no counters of the kernel")
def test_a_busy_process_beside_this_one_is_seen():
    cpus = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cpus)]
    try:
        load, answer = CpuLoad(), None
        for _ in range(50):
            time.sleep(0.3)
            answer = load.has_room(cpus)
            if answer is False:
                break
        assert answer is False
    finally:
        for other in others:
            other.kill()
            other.wait()

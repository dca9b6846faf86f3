"""The thread policy against simulated machines, and the CPU limits that it starts from."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from hfpaged.program.threads import MIN_THREAD_SECONDS, ThreadPolicy, usable_cpus

STEP = 10e-3  # seconds of the simulated step on one thread of an idle machine


def unloaded(limit: int, **options) -> ThreadPolicy:
    """A policy that always hears that there is a CPU for every thread."""
    return ThreadPolicy(limit, has_room=lambda threads: True, **options)


def simulate(
    policy: ThreadPolicy,
    machine: Callable[[int], float],
    steps: int,
    estimate: float = STEP,
    had_cpu: float = 0.0,
) -> list[int]:
    """Run steps on a machine that takes `machine(threads)` seconds for each. Returns the threads they used.

    Args:
        had_cpu: the part of their time that all threads had the CPU; 0: nobody knows.
    """
    used = []
    for _ in range(steps):
        used.append(policy.choose(estimate))
        seconds = machine(used[-1])
        policy.record(estimate, seconds, had_cpu)
    return used


def idle(threads: int) -> float:
    return STEP / threads


def one_core_taken(threads: int) -> float:
    """Two cores, one of them busy: a second thread waits for its time slices."""
    return STEP if threads == 1 else 2 * STEP


def four_free_cores(threads: int) -> float:
    return STEP / threads if threads <= 4 else STEP / 4 * (1 + threads / 4)


def test_an_idle_machine_keeps_all_threads_and_seldom_tries_fewer():
    used = simulate(unloaded(2), idle, 1000)
    assert used.count(1) <= 15
    assert used[-1] == 2


@pytest.mark.parametrize("limit", [2, 8])
def test_threads_that_have_the_cpu_all_the_time_are_not_tried_for_being_too_many(limit):
    assert set(simulate(unloaded(limit), idle, 500, had_cpu=0.95)) == {limit}


def test_threads_that_lose_the_cpu_become_fewer():
    policy = unloaded(2)
    simulate(policy, idle, 100, had_cpu=0.95)
    assert simulate(policy, one_core_taken, 60, had_cpu=0.5)[-30:].count(1) >= 25


def test_threads_that_lose_the_cpu_from_the_first_step_on_become_fewer_at_once():
    assert simulate(unloaded(2), one_core_taken, 10, had_cpu=0.5)[:5] == [2, 1, 1, 1, 1]


def test_a_busy_core_makes_it_drop_to_one_thread_within_a_few_steps():
    used = simulate(unloaded(2), one_core_taken, 1000)
    assert set(used[5:20]) <= {1, 2}
    assert used[5:].count(2) <= 15


def test_time_lost_to_a_busy_core_is_small():
    used = simulate(unloaded(2), one_core_taken, 500)
    assert sum(map(one_core_taken, used)) <= 1.05 * 500 * STEP


def test_more_threads_are_seldom_tried_while_others_leave_no_cpu_for_them():
    asked = []
    policy = ThreadPolicy(2, has_room=lambda threads: asked.append(threads))
    used = simulate(policy, one_core_taken, 1500)
    assert used[10:].count(2) <= 3
    assert len(asked) > 50 and set(asked) == {2}
    # Whoever takes the CPU may yield it all the same: this is found out.
    assert simulate(policy, idle, 1500)[-30:].count(2) >= 28


def test_more_threads_are_tried_soon_after_others_left_a_cpu():
    rooms = [1]
    policy = ThreadPolicy(2, has_room=lambda threads: threads <= rooms[0])
    simulate(policy, one_core_taken, 100)
    rooms[0] = 2
    assert simulate(policy, idle, 60)[-20:].count(2) >= 18


def test_it_follows_a_machine_that_becomes_busy_and_idle_again():
    policy = unloaded(2)
    simulate(policy, idle, 300)
    assert simulate(policy, one_core_taken, 60)[-30:].count(1) >= 25
    assert simulate(policy, idle, 200)[-30:].count(2) >= 28


def test_slow_steps_now_and_then_do_not_make_it_try_slower_numbers_more_often():
    """A memory-bound step beside a process that takes one core and now and then the other one for a moment."""
    pauses = random.Random(0)

    def machine(threads: int) -> float:
        return (STEP if threads == 1 else 3 * STEP) + (STEP if pauses.random() < 0.1 else 0.0)

    used = simulate(unloaded(2), machine, 400)
    assert used.count(2) <= 12


@pytest.mark.parametrize("limit", [3, 8, 16])
def test_it_finds_the_number_of_free_cores(limit):
    used = simulate(unloaded(limit), four_free_cores, 600)
    best = min(map(four_free_cores, range(1, limit + 1)))
    assert sum(map(four_free_cores, used[-100:])) <= 1.15 * 100 * best


class Quota:
    """Two cores of which a CPU quota pays for one and a half: whoever has used it up waits for the next period."""

    PERIOD = 0.1
    CPU_SECONDS = 0.15  # of each period

    def __init__(self, work: float, speedup: float):
        self._work = work  # seconds of a step on one thread
        self._speedup = speedup  # of two threads
        self._clock = self._used = 0.0  # both in the present period

    def __call__(self, threads: int) -> float:
        elapsed, left, speed = 0.0, self._work, 1.0 if threads == 1 else self._speedup
        while left > 1e-9:
            paid_for = (self.CPU_SECONDS - self._used) / threads
            runs = min(left / speed, self.PERIOD - self._clock, paid_for)
            left -= runs * speed
            self._clock += runs
            self._used += runs * threads
            elapsed += runs
            if left > 1e-9:
                elapsed += self.PERIOD - self._clock
                self._clock = self._used = 0.0
        return elapsed


@pytest.mark.parametrize("work", [0.0135, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("speedup", [1.2, 1.5, 2.0])
def test_under_a_quota_of_one_and_a_half_cores_it_is_nearly_as_fast_as_the_best_fixed_number(work, speedup):
    machines = [Quota(work, speedup), Quota(work, speedup)]
    fixed = [sum(machine(threads) for _ in range(500)) for threads, machine in zip((1, 2), machines, strict=True)]
    machine, times = Quota(work, speedup), []

    def measured(threads: int) -> float:
        times.append(machine(threads))
        return times[-1]

    simulate(unloaded(2), measured, 500, estimate=work)
    assert sum(times) <= 1.1 * min(fixed)


def test_small_steps_use_one_thread_and_are_not_tried_on_more():
    assert set(simulate(unloaded(4), idle, 50, estimate=MIN_THREAD_SECONDS)) == {1}


def test_small_and_large_steps_learn_apart():
    policy = unloaded(2)
    simulate(policy, one_core_taken, 50)
    assert simulate(policy, idle, 3, estimate=100 * STEP)[0] == 2


def test_threads_get_rows_of_their_own_while_all_of_them_have_the_cpu():
    policy = unloaded(2)
    seconds, busy, idle = 0.1, 0.7, 0.98

    def after(steps: int, had_cpu: float) -> bool:
        for _ in range(steps):
            policy.record(seconds, seconds, had_cpu)
        return policy.can_split_rows(seconds)

    assert not policy.can_split_rows(seconds)
    assert after(1, idle)
    assert not after(8, busy)
    assert after(16, idle)
    assert unloaded(2, min_thread_seconds=0).can_split_rows(seconds)


def test_without_a_minimum_all_threads_are_always_used():
    assert set(simulate(unloaded(3, min_thread_seconds=0), one_core_taken, 50)) == {3}


@pytest.mark.parametrize(
    "files, membership",
    [
        ({"cpu.max": "100000 100000\n"}, "0::/\n"),
        ({"cpu.max": "50000 100000\n"}, "0::/a/path/of/the/host\n"),
        ({"cpu.max": "max 100000\n", "user/app/cpu.max": "50000 100000\n"}, "0::/user/app\n"),
        ({"user/cpu.max": "50000 100000\n", "user/app/cpu.max": "max 100000\n"}, "0::/user/app\n"),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:memory:/app\n"),
        ({"cpu/app/cpu.cfs_quota_us": "1000\n", "cpu/app/cpu.cfs_period_us": "1000\n"}, "2:cpu,cpuacct:/app\n0::/\n"),
    ],
)
def test_a_cpu_quota_of_the_own_group_or_one_around_it_limits_the_threads(tmp_path, files, membership):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "membership").write_text(membership)
    assert usable_cpus(tmp_path, tmp_path / "membership") == 1


@pytest.mark.parametrize("content", ["max 100000\n", "", "nonsense"])
def test_without_a_quota_the_affinity_counts(tmp_path, content):
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cpus(tmp_path, tmp_path / "membership") == len(os.sched_getaffinity(0))

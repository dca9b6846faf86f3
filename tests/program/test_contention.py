"""On two cores that are not its own alone, the thread policy is nearly as fast as the best fixed number of threads.

Slow, and the times mean something on an otherwise idle machine only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine.hooks import with_import_paths
from program.control_group import cpu_quota

pytestmark = pytest.mark.slow

ROUNDS = 4
SCRIPT = Path(__file__).with_name("step_times.py")


@contextlib.contextmanager
def one_core_burned() -> Iterator[Callable[[], None] | None]:
    """Beside a process that computes all the time, and may run on any core."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


@contextlib.contextmanager
def one_core_allowed() -> Iterator[Callable[[], None]]:
    """As `taskset` does it."""
    yield lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@contextlib.contextmanager
def quota_of_one_and_a_half() -> Iterator[Callable[[], None]]:
    with contextlib.ExitStack() as stack:
        try:
            join = stack.enter_context(cpu_quota(1.5))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield join


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="written for two cores")
@pytest.mark.parametrize("tier", ["program", "leaves"])
@pytest.mark.parametrize("requests", [1, 64])
@pytest.mark.parametrize("machine", [one_core_burned, one_core_allowed, quota_of_one_and_a_half])
def test_within_15_percent_of_the_best_fixed_number_of_threads(machine, requests, tier, smollm2_path):
    with machine() as confine:
        command = [sys.executable, str(SCRIPT), str(smollm2_path), str(requests), str(ROUNDS), tier]
        answer = subprocess.run(
            command, preexec_fn=confine, env=with_import_paths(), capture_output=True, text=True
        )
    assert answer.returncode == 0, answer.stderr
    seconds = json.loads(answer.stdout)
    best = min(seconds["1"], seconds["2"])
    print(f"{tier}, {machine.__name__}, {requests} requests: {seconds}: {seconds['policy'] / best:.2f} times the best")
    assert seconds["policy"] <= 1.15 * best

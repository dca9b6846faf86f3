"""The stepping thread: starts on demand, runs commands between steps, ends when idle, knows about forks."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hfpaged.errors import EngineDeadError, ForkedEngineError
from hfpaged.runtime.driver import Driver


def idle_driver(**options):
    return Driver(lambda: False, lambda: False, **options)


def test_making_a_driver_starts_no_thread():
    before = threading.active_count()
    idle_driver()
    assert threading.active_count() == before


def test_call_runs_on_one_other_thread_and_returns_its_result():
    driver = idle_driver()
    threads = {driver.call(threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_call_raises_what_the_function_raises_and_the_thread_lives_on():
    driver = idle_driver()
    with pytest.raises(KeyError, match="lost"):
        driver.call(lambda: {}["lost"])
    assert driver.call(lambda: 7) == 7


def test_thread_ends_after_its_idle_time_and_starts_again():
    driver = idle_driver(idle_seconds=0.02)
    first = driver.call(threading.current_thread)
    first.join(timeout=5)
    assert not first.is_alive()
    assert driver.call(lambda: "again") == "again"


def test_steps_go_on_until_there_is_nothing_to_do():
    steps = iter([True, True, True, False])
    done = threading.Event()

    def step():
        more = next(steps, False)
        if not more:
            done.set()
        return more

    driver = Driver(step, lambda: False, idle_seconds=0.02)
    driver.post(lambda: None)
    assert done.wait(5)
    assert next(steps, "exhausted") == "exhausted"


def test_an_error_in_a_step_does_not_kill_the_thread():
    calls = []

    def step():
        calls.append(1)
        raise RuntimeError("boom")

    driver = Driver(step, lambda: False, idle_seconds=0.5)
    driver.call(lambda: None)
    assert driver.call(lambda: "alive") == "alive"
    assert calls


@pytest.mark.parametrize("live", [False, True])
def test_a_forked_child_works_without_live_requests_and_is_told_with_them(live):
    driver = Driver(lambda: False, lambda: live, idle_seconds=5)
    driver.call(lambda: None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            verdict = b"worked" if driver.call(lambda: True) else b"wrong"
        except ForkedEngineError:
            verdict = b"refused"
        os.write(writer, verdict)
        os._exit(0)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.read(reader, 16) == (b"refused" if live else b"worked")


def test_ended_at_exit_it_says_so_and_starts_no_other_thread():
    ends = []
    driver = idle_driver(idle_seconds=5, on_end=lambda: ends.append(threading.current_thread()))
    thread = driver.call(threading.current_thread)
    thread.end()
    assert not thread.is_alive()
    assert ends == [thread]
    with pytest.raises(EngineDeadError, match="exiting"):
        driver.post(lambda: None)
    assert driver.call(threading.current_thread) is threading.current_thread()


def test_a_process_waits_for_a_thread_that_frees_its_engine_as_it_ends():
    """The thread's own reference to the engine may be the last; freeing tensors after the interpreter aborts."""
    program = """
        import threading, time
        from hfpaged.runtime.driver import Driver

        class Slow:
            def __del__(self):
                time.sleep(0.3)
                print("freed", flush=True)

        slow = Slow()
        driver = Driver(lambda slow=slow: False, lambda: False, idle_seconds=0.05)
        driver.post(lambda: None)
        del slow, driver
        time.sleep(0.2)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "freed\n"), run.stderr

"""Control groups of the tests' own, to run a process under a CPU quota."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_PERIOD_US = 100_000


@contextlib.contextmanager
def cpu_quota(cpus: float, root: Path = Path("/sys/fs/cgroup")) -> Iterator[Callable[[], None]]:
    """A group, of cgroup v2 or v1, that grants `cpus` CPUs' worth of time.

    Yields:
        What a process calls to join it. All have to be gone at the end of the block.

    Raises:
        OSError: this user may not make such groups.
    """
    v2 = (root / "cgroup.controllers").exists()
    group = (root if v2 else root / "cpu") / f"hfpaged-test-{os.getpid()}"
    group.mkdir()
    try:
        quota = int(cpus * _PERIOD_US)
        if v2:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield lambda: join(group)
    finally:
        group.rmdir()


def join(group: Path) -> None:
    """Move this process into a group."""
    (group / "cgroup.procs").write_text("0")

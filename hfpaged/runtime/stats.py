"""Counters of an engine, as `engine.stats()` shows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hfpaged.core.scheduler import SchedulerCounters
from hfpaged.runtime.workspace import Workspace


@dataclass
class StepTimes:
    """Seconds that the stepping thread spent, by phase, and how many steps it made."""

    steps: int = 0
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


@dataclass
class EngineCounters:
    """What is counted outside the books of the scheduler.

    Attributes:
        fallbacks: calls or fusions that took the stock path, by reason.
        books: totals of the schedulers of released workspaces.
    """

    times: StepTimes = field(default_factory=StepTimes)
    books: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    weight_changes: int = 0
    failed_steps: int = 0


def engine_stats(counters: EngineCounters, workspace: Workspace | None) -> dict[str, Any]:
    """Gauges and counters by name, see README. Totals go on over a release; gauges are 0 without a workspace."""
    times = counters.times
    books = asdict(SchedulerCounters() if workspace is None else workspace.scheduler.counters)
    return {
        **_gauges(workspace),
        **{name: value + counters.books[name] for name, value in books.items()},
        "steps": times.steps,
        "failed_steps": counters.failed_steps,
        "weight_changes": counters.weight_changes,
        "seconds_schedule": times.schedule,
        "seconds_forward": times.forward,
        "seconds_sample": times.sample,
        "fallbacks": dict(counters.fallbacks),
    }


def _gauges(workspace: Workspace | None) -> dict[str, Any]:
    names = ("blocks_total", "blocks_free", "blocks_cached", "blocks_swapped", "block_size", "running", "waiting")
    if workspace is None:
        return {"backend": None, "tier": None, "tier_reason": None, **dict.fromkeys(names, 0)}
    scheduler, pool = workspace.scheduler, workspace.pool
    values = (
        pool.num_blocks,
        pool.num_free,
        pool.num_cached,
        workspace.store.num_blocks,
        pool.block_size,
        scheduler.num_running,
        scheduler.num_waiting,
    )
    return {
        "backend": workspace.backend.name,
        "tier": workspace.tier.name,
        "tier_reason": workspace.tier_reason,
        **dict(zip(names, values, strict=True)),
    }

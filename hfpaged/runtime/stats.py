"""Counters of an engine, as `engine.stats()` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from hfpaged.core.scheduler import SchedulerCounters
from hfpaged.core.snapshot import BooksSnapshot
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


class EngineSnapshot(NamedTuple):
    """An engine between two steps.

    Attributes:
        stats: as `engine.stats()` gives them.
        books: blocks and requests, of each workspace; empty before the first request and after a release.
    """

    stats: dict[str, Any]
    books: tuple[BooksSnapshot, ...]


def engine_stats(counters: EngineCounters, workspaces: Sequence[Workspace]) -> dict[str, Any]:
    """Gauges and counters by name, see README. Totals go on over a release; gauges are 0 without a workspace."""
    times, books = counters.times, Counter(counters.books)
    for workspace in workspaces:
        books.update(asdict(workspace.scheduler.counters))
    return {
        **_description(workspaces[-1] if workspaces else None),
        **_gauges(workspaces),
        **{field.name: books[field.name] for field in fields(SchedulerCounters)},
        "steps": times.steps,
        "failed_steps": counters.failed_steps,
        "weight_changes": counters.weight_changes,
        "seconds_schedule": times.schedule,
        "seconds_forward": times.forward,
        "seconds_sample": times.sample,
        "fallbacks": dict(counters.fallbacks),
    }


def _description(workspace: Workspace | None) -> dict[str, Any]:
    if workspace is None:
        return {"backend": None, "tier": None, "tier_reason": None, "tier_refusals": {}, "block_size": 0}
    return {
        "backend": workspace.backend.name,
        "tier": workspace.tier.name,
        "tier_reason": workspace.tier_reason,
        "tier_refusals": workspace.tier.refusals(),
        "block_size": workspace.pool.block_size,
    }


def _gauges(workspaces: Sequence[Workspace]) -> dict[str, int]:
    return {
        "released_bytes": sum(one.released.num_bytes for one in workspaces),
        "blocks_total": sum(one.pool.num_blocks for one in workspaces),
        "blocks_free": sum(one.pool.num_free for one in workspaces),
        "blocks_cached": sum(one.pool.num_cached for one in workspaces),
        "blocks_swapped": sum(one.store.num_blocks for one in workspaces),
        "running": sum(one.scheduler.num_running for one in workspaces),
        "waiting": sum(one.scheduler.num_waiting for one in workspaces),
    }

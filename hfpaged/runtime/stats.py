"""Counters of an engine, as `engine.stats()` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from hfpaged.core.counters import SchedulerCounters
from hfpaged.core.snapshot import BooksSnapshot
from hfpaged.quantization.summary import quantized_modules
from hfpaged.runtime.workspace import Workspace


@dataclass
class StepTimes:
    """Seconds that the stepping thread spent, by phase, and how many steps it made."""

    steps: int = 0
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


@dataclass
class AheadCounters:
    """Of devices that work behind the host.

    Attributes:
        steps_ahead: steps launched before the tokens of the one before were read.
        host_drawn_tokens: draws that only the host could do, each of which cost its request a step.
        dropped_tokens: tokens drawn for requests that had ended by the time they were read.
        captured_steps: steps of released workspaces that were started as a captured whole.
        shared_prefix_steps: steps of released workspaces that read shared blocks once.
    """

    steps_ahead: int = 0
    host_drawn_tokens: int = 0
    dropped_tokens: int = 0
    captured_steps: int = 0
    shared_prefix_steps: int = 0


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
    ahead: AheadCounters = field(default_factory=AheadCounters)
    sentinel_checks: int = 0
    sentinel_corruptions: int = 0


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
        "sentinel_checks": counters.sentinel_checks,
        "sentinel_corruptions": counters.sentinel_corruptions,
        "seconds_schedule": times.schedule,
        "seconds_forward": times.forward,
        "seconds_sample": times.sample,
        "fallbacks": dict(counters.fallbacks),
        **_ahead(counters.ahead, workspaces),
    }


def _ahead(counters: AheadCounters, workspaces: Sequence[Workspace]) -> dict[str, Any]:
    replayed = sum(workspace.tier.replayed_steps for workspace in workspaces)
    shared = sum(workspace.backend.shared_prefix_steps for workspace in workspaces)
    return {
        **asdict(counters),
        "captured_steps": counters.captured_steps + replayed,
        "shared_prefix_steps": counters.shared_prefix_steps + shared,
    }


def _description(workspace: Workspace | None) -> dict[str, Any]:
    if workspace is None:
        return {
            "backend": None,
            "backend_reasons": {},
            "tier": None,
            "tier_reason": None,
            "tier_refusals": {},
            "fusion_refusals": {},
            "quantization": {},
            "capture_problem": None,
            "capture_breaks": {},
            "block_size": 0,
        }
    return {
        "backend": workspace.backend.name,
        "backend_reasons": dict(workspace.rejected_backends),
        "tier": workspace.tier.name,
        "tier_reason": workspace.tier_reason,
        "tier_refusals": workspace.tier.refusals(),
        "fusion_refusals": {": ".join(pair): count for pair, count in list(workspace.fusions.refusals.items())},
        "capture_problem": workspace.tier.capture_problem,
        "capture_breaks": workspace.tier.breaks(),
        "quantization": quantized_modules(workspace.view.model),
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

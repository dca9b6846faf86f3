"""What requests that wait cost those that run: steps of a full batch with longer and longer queues behind it."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

import hfpaged
from hfpaged.cli.bench.engines import NEVER_ENDS
from hfpaged.errors import RequestCancelled

RUNNING = 256
QUEUES = (0, 500, 2000)  # requests that wait
PARTS = ("schedule", "forward", "sample")  # of a step
_PROMPT_TOKENS = 8
_STEPS = 12


@dataclass(frozen=True)
class QueueProfile:
    """The median step of `running` requests that decode while `waiting` others wait. Seconds."""

    running: int
    waiting: int
    schedule: float
    forward: float
    sample: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.schedule + self.forward + self.sample


def profile_queue(model: PreTrainedModel, waiting: int, running: int = RUNNING) -> QueueProfile:
    """Patch `model`, run a full batch with a queue behind it for some steps, cancel the rest and unpatch."""
    vocab, scope = model.config.get_text_config().vocab_size, hfpaged.CancelScope()
    full: list[dict[str, Any]] = []

    def after_step() -> None:
        stats = engine.stats()
        if (stats["running"], stats["waiting"]) == (running, waiting):
            full.append(stats)
        # Before the first of these, and the next, prompts are computed.
        if len(full) == 2 + _STEPS:
            scope.cancel()

    with hfpaged.patched(model, max_requests=running), contextlib.suppress(RequestCancelled):
        engine = hfpaged.engine(model)
        engine.add_listener(after_step)
        # The rows of one call are queued together.
        ids = torch.randint(vocab, (running + waiting, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4 * _STEPS,
            do_sample=False,
            eos_token_id=NEVER_ENDS,
            pad_token_id=0,
            hfpaged={"scope": scope},
        )
    return QueueProfile(running, waiting, *(_median_step(full[1:], f"seconds_{part}") for part in PARTS))


def _median_step(after_steps: Sequence[dict[str, Any]], total: str) -> float:
    return statistics.median(after[total] - before[total] for before, after in itertools.pairwise(after_steps))


def queue_table(profiles: Sequence[QueueProfile]) -> str:
    """One line a queue: milliseconds of a step, and of its parts."""
    lines = [f"{'running':>8}{'waiting':>9}{'ms':>9}" + "".join(f"{part:>10}" for part in PARTS)]
    for profile in profiles:
        parts = "".join(f"{1e3 * getattr(profile, part):>10.2f}" for part in PARTS)
        lines.append(f"{profile.running:>8}{profile.waiting:>9}{1e3 * profile.seconds:>9.2f}{parts}")
    return "\n".join(lines)


def queue_rows(profiles: Sequence[QueueProfile]) -> list[dict[str, Any]]:
    """The same as JSON objects, in seconds."""
    return [asdict(profile) for profile in profiles]

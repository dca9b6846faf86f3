"""LaunchedStep: a step that the device is computing, with what the host will want of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from hfpaged.core.plan import UNKNOWN_TOKEN, Plan
from hfpaged.runtime.device.accelerator import Accelerator, Mark
from hfpaged.runtime.device.staging import PinnedRing
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.tiers import StepOutput
from hfpaged.sampling.device_draw import DrawTable, draw_on_device


@dataclass
class LaunchedStep:
    """All tensors are copies, which later steps leave as they are.

    Attributes:
        plan: what was launched.
        accelerator: where.
        requests: those whose token is drawn on the device, in order.
        drawn: their tokens, int64 [n] on the device; None if there are none.
        tokens: the same in page-locked memory, to be read behind `mark`.
        on_host: requests whose tokens the host draws, each with its logits [k, V].
        steered: requests whose logits the caller gets, each with fp32 [k, V].
        scored: requests with scored prompt tokens, by id, and the logits of the whole step.
    """

    plan: Plan
    accelerator: Accelerator
    requests: list[LiveRequest] = field(default_factory=list)
    drawn: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    mark: Mark | None = None
    on_host: list[tuple[LiveRequest, torch.Tensor]] = field(default_factory=list)
    steered: list[tuple[LiveRequest, torch.Tensor]] = field(default_factory=list)
    scored: dict[int, LiveRequest] = field(default_factory=dict)
    scored_output: StepOutput | None = None

    def sampled(self) -> dict[int, int | None]:
        """What to commit: tokens that are on their way, and requests that wait for their caller or the host."""
        sampled: dict[int, int | None] = {request_id: None for _, request_id in self.plan.sampled_rows()}
        sampled.update(dict.fromkeys((live.request.id for live in self.requests), UNKNOWN_TOKEN))
        return sampled

    def members(self) -> list[LiveRequest]:
        """All requests that get something from it."""
        return [*self.requests, *(live for live, _ in (*self.on_host, *self.steered)), *self.scored.values()]


class StepLauncher:
    """Queues what follows a forward: draws, and the copies for the host.

    Args:
        most_drawn: tokens that can be drawn in one step; the host draws any further ones.
    """

    def __init__(self, accelerator: Accelerator, most_drawn: int):
        self._accelerator = accelerator
        self._most_drawn = most_drawn
        self._indices = PinnedRing(accelerator, torch.int64)
        self._numbers = PinnedRing(accelerator, torch.float64)

    def launch(self, plan: Plan, live: Mapping[int, LiveRequest], output: StepOutput) -> LaunchedStep:
        """Queue the draws of a step whose forward has been queued."""
        step = LaunchedStep(plan, self._accelerator)
        places: list[int] = []
        with torch.no_grad(), self._accelerator.active():
            for rows, request_id in plan.sampled_rows():
                one = live[request_id]
                if one.spec.steered:
                    logits = output.logits[rows.start : rows.stop].to(torch.float32, copy=True)
                    step.steered.append((one, logits))
                elif one.draw is None or len(step.requests) == self._most_drawn:
                    step.on_host.append((one, output.logits[rows.start : rows.stop].clone()))
                else:
                    step.requests.append(one)
                    places.append(rows.start)
            step.scored = {entry.id: live[entry.id] for entry in plan.entries if entry.scored}
            if step.scored:
                step.scored_output = StepOutput(output.logits.clone(), None)
            if places:
                self._draw(step, places, output)
            step.mark = self._accelerator.mark()
        return step

    def _draw(self, step: LaunchedStep, places: list[int], output: StepOutput) -> None:
        sampled = [index for index, one in enumerate(step.requests) if not one.draw.is_argmax]
        # Almost always every row of logits is one request's, in order.
        in_order = places == list(range(len(output.argmax)))
        if in_order and not sampled:
            step.drawn = output.argmax
        else:
            step.drawn = self._draw_some(step.requests, places, sampled, output)
        step.tokens = self._accelerator.pinned(len(step.requests), torch.int64)
        self._accelerator.download(step.drawn, step.tokens)

    def _draw_some(
        self, requests: list[LiveRequest], places: list[int], sampled: list[int], output: StepOutput
    ) -> torch.Tensor:
        """The likeliest token of each row, then other ones for those that sample."""
        chosen = [requests[index] for index in sampled]
        table = DrawTable.of(
            [one.draw for one in chosen], [one.row for one in chosen], [one.request.length for one in chosen]
        )
        rows = np.array(places, dtype=np.int64)
        at = np.array(sampled, dtype=np.int64)
        rows_of_all, where, rows_of_sampled, top_k = self._indices.upload((rows, at, rows[at], table.top_k))
        drawn = output.argmax.index_select(0, rows_of_all)
        if sampled:
            (numbers,) = self._numbers.upload((table.numbers,))
            scores = output.logits.index_select(0, rows_of_sampled).to(torch.float32)
            drawn.index_copy_(0, where, draw_on_device(scores, table, numbers, top_k))
        return drawn

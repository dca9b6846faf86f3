"""LaunchedStep: a step that the device is computing, with what the host will want of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hfpaged.core.plan import UNKNOWN_TOKEN, Plan
from hfpaged.runtime.device.accelerator import Accelerator, Mark
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.tier import StepOutput
from hfpaged.sampling.draw_table import Draw, DrawTable


class StepDraws(NamedTuple):
    """What the device draws in a step.

    Attributes:
        requests: those that get one token, which the next step reads on the device.
        verified: those that guess, each with its number of draws: one behind each guess, and one more. They wait for
            the host to compare.
        table: the draws, in this order.
    """

    requests: list[LiveRequest]
    verified: list[tuple[LiveRequest, int]]
    table: DrawTable

    @property
    def ids(self) -> frozenset[int]:
        """Of all requests that it draws for."""
        return frozenset(live.request.id for live in (*self.requests, *(live for live, _ in self.verified)))


@dataclass
class LaunchedStep:
    """Tensors of logits are copies, which later steps leave as they are.

    Attributes:
        plan: what was launched.
        accelerator: where.
        draws: what was drawn there.
        drawn: the tokens of `requests`, int64 [n] on the device; a later step may overwrite them.
        tokens: of all draws, in page-locked memory, to be read behind `mark`.
        on_host: requests whose tokens the host draws, each with its logits [k, V].
        finite: whether the logits of each row are, bool [S] in page-locked memory; None if nobody asked.
        steered: requests whose logits the caller gets, each with fp32 [k, V].
        scored: requests with scored prompt tokens, by id, and the logits of the whole step.
    """

    plan: Plan
    accelerator: Accelerator
    draws: StepDraws
    drawn: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    mark: Mark | None = None
    on_host: list[tuple[LiveRequest, torch.Tensor]] = field(default_factory=list)
    steered: list[tuple[LiveRequest, torch.Tensor]] = field(default_factory=list)
    scored: dict[int, LiveRequest] = field(default_factory=dict)
    scored_output: StepOutput | None = None

    @property
    def requests(self) -> list[LiveRequest]:
        """Those whose token the next step reads on the device."""
        return self.draws.requests

    def sampled(self) -> dict[int, int | None]:
        """What to commit: tokens that are on their way, and requests that wait for their caller or the host."""
        sampled: dict[int, int | None] = {request_id: None for _, request_id in self.plan.sampled_rows()}
        sampled.update(dict.fromkeys((live.request.id for live in self.requests), UNKNOWN_TOKEN))
        return sampled

    def members(self) -> list[LiveRequest]:
        """All requests that get something from it."""
        waiting = (live for live, _ in (*self.draws.verified, *self.on_host, *self.steered))
        return [*self.requests, *waiting, *self.scored.values()]


class StepLauncher:
    """Says what of a step the device draws, and queues the copies for the host behind it.

    Args:
        most_drawn: tokens that can be drawn in one step; the host draws any further ones.
    """

    def __init__(self, accelerator: Accelerator, most_drawn: int):
        self._accelerator = accelerator
        self._most_drawn = most_drawn

    def prepare(self, plan: Plan, live: Mapping[int, LiveRequest]) -> StepDraws:
        """What the device will draw in a step that is about to be queued."""
        requests: list[tuple[LiveRequest, range]] = []
        verified: list[tuple[LiveRequest, range]] = []
        count = 0
        for rows, request_id in plan.sampled_rows():
            one = live[request_id]
            if one.spec.steered or one.draw is None or count + len(rows) > self._most_drawn:
                continue
            (verified if one.spec.may_speculate else requests).append((one, rows))
            count += len(rows)
        return StepDraws(
            [one for one, _ in requests],
            [(one, len(rows)) for one, rows in verified],
            DrawTable.of([draw for one, rows in (*requests, *verified) for draw in _draws(one, rows)]),
        )

    def launch(
        self, plan: Plan, live: Mapping[int, LiveRequest], draws: StepDraws, output: StepOutput, watch: bool = False
    ) -> LaunchedStep:
        """Queue what follows a step whose forward and draws have been queued.

        Args:
            watch: have the device see whether the logits are finite.
        """
        step = LaunchedStep(plan, self._accelerator, draws)
        drawn_here = draws.ids
        with torch.no_grad(), self._accelerator.active():
            for rows, request_id in plan.sampled_rows():
                one = live[request_id]
                if one.spec.steered:
                    logits = output.logits[rows.start : rows.stop].to(torch.float32, copy=True)
                    step.steered.append((one, logits))
                elif request_id not in drawn_here:
                    step.on_host.append((one, output.logits[rows.start : rows.stop].clone()))
            step.scored = {entry.id: live[entry.id] for entry in plan.entries if entry.scored}
            if step.scored:
                step.scored_output = StepOutput(output.logits.clone(), None)
            if drawn_here:
                step.drawn = output.drawn[: len(draws.requests)]
                step.tokens = self._accelerator.pinned(len(output.drawn), torch.int64)
                self._accelerator.download(output.drawn, step.tokens)
            if watch and len(output.argmax):
                # The largest is NaN where any is, and infinite where one is too large or all are masked.
                finite = torch.isfinite(output.logits.gather(1, output.argmax[:, None])[:, 0])
                step.finite = self._accelerator.pinned(len(finite), torch.bool)
                self._accelerator.download(finite, step.finite)
            step.mark = self._accelerator.mark()
        return step


def _draws(live: LiveRequest, rows: range) -> list[Draw]:
    """A draw from each of a request's rows of logits: behind its guesses, if it has any, each at its own position."""
    first = live.request.length - len(rows) + 1
    return [Draw(row, live.draw, live.row, first + index) for index, row in enumerate(rows)]

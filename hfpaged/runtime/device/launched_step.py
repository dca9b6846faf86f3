"""LaunchedStep: a step that the device is computing, with what the host will want of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hfpaged.core.plan import UNKNOWN_TOKEN, Plan
from hfpaged.runtime.device.accelerator import Accelerator, Mark
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.tier import StepOutput
from hfpaged.sampling.draw_table import DrawTable


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
        finite: whether the logits of each row are, bool [S] in page-locked memory; None if nobody asked.
        on_host: requests whose tokens the host draws, each with its logits [k, V].
        steered: requests whose logits the caller gets, each with fp32 [k, V].
        scored: requests with scored prompt tokens, by id.
        scored_output: the logits of the whole step, if there are any of those.
        mark: behind all of it.
    """

    plan: Plan
    accelerator: Accelerator
    draws: StepDraws
    drawn: torch.Tensor | None
    tokens: torch.Tensor | None
    finite: torch.Tensor | None
    on_host: list[tuple[LiveRequest, torch.Tensor]]
    steered: list[tuple[LiveRequest, torch.Tensor]]
    scored: dict[int, LiveRequest]
    scored_output: StepOutput | None
    mark: Mark

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

"""Settling a launched step: the one place where the host waits for the device. What it drew goes into the books."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch

from hfpaged.core.scheduler import Scheduler
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.launched_step import LaunchedStep
from hfpaged.runtime.drawing import Outcome, draw_rows, outcome_of, score_prompts
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.sampling.logprobs import TokenLogprob
from hfpaged.sampling.sampler import Drawn, Sampler

Learn = Callable[[int, int, int], None]


class Settlement(NamedTuple):
    """What a step brought those who have not ended meanwhile.

    Attributes:
        outcomes: of those whose tokens were drawn; the books have them.
        steered: those who get their logits, fp32 [k, V].
        scored: those whose prompt tokens were scored.
        dropped: tokens that were drawn for others.
    """

    outcomes: list[Outcome]
    steered: list[tuple[LiveRequest, torch.Tensor]]
    scored: list[tuple[LiveRequest, list[TokenLogprob]]]
    dropped: int


def settle(
    step: LaunchedStep, scheduler: Scheduler, alive: Container[int], sampler: Sampler, learn: Learn
) -> Settlement:
    """Wait for a step, draw what the host has to draw, and enter it in the books.

    Args:
        alive: ids of the requests that have not ended.
        learn: told of guesses that were verified.
    """
    step.mark.synchronize()
    outcomes, dropped = _drawn_on_device(step, alive)
    logprobs = {}
    if step.on_host or step.scored:
        # The step behind it is running: what the host still has to compute does not wait for that one.
        with step.accelerator.beside():
            drawn = _drawn_on_host(step, alive, sampler)
            logprobs = score_prompts(step.plan, step.scored, step.scored_output) if step.scored else {}
        _hand_over(drawn, step.accelerator)
        outcomes += drawn
    for outcome in outcomes:
        _enter(scheduler, outcome, learn)
    return Settlement(
        outcomes,
        [(live, logits) for live, logits in step.steered if live.request.id in alive],
        [(step.scored[request_id], found) for request_id, found in logprobs.items() if request_id in alive],
        dropped,
    )


def _drawn_on_device(step: LaunchedStep, alive: Container[int]) -> tuple[list[Outcome], int]:
    drawn = Drawn.of_tokens([] if step.tokens is None else step.tokens.tolist())
    outcomes, dropped = [], 0
    for place, live in enumerate(step.requests):
        if live.request.id not in alive:
            dropped += 1
        elif drawn.errors[place] is not None:
            outcomes.append(Outcome(live, [], error=drawn.errors[place]))
        else:
            outcomes.append(Outcome(live, [drawn.tokens[place]]))
    first = len(step.requests)
    for live, count in step.draws.verified:
        if live.request.id in alive:
            outcomes.append(outcome_of(live, drawn, range(first, first + count)))
        first += count
    return outcomes, dropped


def _drawn_on_host(step: LaunchedStep, alive: Container[int], sampler: Sampler) -> list[Outcome]:
    on_host = [(live, logits) for live, logits in step.on_host if live.request.id in alive]
    if not on_host:
        return []
    requests, first = [], 0
    for live, logits in on_host:
        requests.append((live, range(first, first + len(logits))))
        first += len(logits)
    return draw_rows(requests, torch.cat([logits for _, logits in on_host]), sampler)


def _hand_over(outcomes: Sequence[Outcome], accelerator: Accelerator) -> None:
    """Let callers read the scores that they get."""
    for outcome in outcomes:
        for tensor in (*outcome.scores, *outcome.logits):
            if tensor is not None:
                accelerator.hand_over(tensor)


def _enter(scheduler: Scheduler, outcome: Outcome, learn: Learn) -> None:
    live, tokens = outcome.live, outcome.tokens
    if live.request.pending:
        if tokens:
            scheduler.settle(live.request.id, tokens[0])
        return
    if outcome.num_drafts:
        accepted = max(0, len(tokens) - 1)
        learn(live.request.id, outcome.num_drafts, accepted)
        scheduler.reject_drafts(live.request.id, outcome.num_drafts - accepted)
    if tokens:
        scheduler.append_tokens(live.request.id, tokens[-1:])

"""From the logits of a step to the tokens of its requests, drafts included.

A request with k draft tokens has k + 1 rows of logits, one behind each. Each row draws its token with the noise of its
own position, as a step without drafts would have; the drafts stand as far as they are what was drawn. So neither the
text nor its distribution depends on speculation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hfpaged.core.plan import Plan
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.tier import StepOutput
from hfpaged.sampling.logprobs import TokenLogprob, token_logprobs
from hfpaged.sampling.sampler import Drawn, Sampler, SampleRow

# A request that draws in a step, and its rows of the step's logits.
Taker = tuple[LiveRequest, range]


@dataclass(slots=True)
class Outcome:
    """What a step brought one request.

    Attributes:
        tokens: the tokens it gets: its accepted drafts, then one more. Empty with an error.
        scores, logits: of each token, as in `Drawn`.
        logprobs: of each token, or nothing.
        error: why nothing could be drawn.
        num_drafts: how many drafts were verified for it.
    """

    live: LiveRequest
    tokens: list[int]
    scores: Sequence[torch.Tensor | None] = ()
    logits: Sequence[torch.Tensor | None] = ()
    logprobs: Sequence[TokenLogprob] = ()
    error: Exception | None = None
    num_drafts: int = 0


def takers_of(plan: Plan, live: Mapping[int, LiveRequest]) -> list[Taker]:
    """Those that catch up in a step, in order: a parent and its forks share rows."""
    return [(live[request_id], rows) for rows, request_id in plan.sampled_rows()]


def wants_logits(plan: Plan, takers: Iterable[Taker]) -> bool:
    """Whether any token of the step is more than the argmax of its logits."""
    return any([one.wants_logits for one, _ in takers]) or any([entry.scored for entry in plan.entries])


def score_prompts(plan: Plan, live: Mapping[int, LiveRequest], output: StepOutput) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of the prompt tokens that the step scored, in order, by request id."""
    found, first = {}, 0
    for entry in plan.entries:
        if entry.scored:
            one = live[entry.id]
            after = entry.start + entry.num_tokens - entry.logits_for + 1
            tokens = one.request.tokens[after : after + entry.scored]
            top = [one.spec.prompt_logprobs] * entry.scored
            found[entry.id] = token_logprobs(output.logits[first : first + entry.scored], tokens, top)
        first += entry.logits_for
    return found


def offer_logits(takers: Iterable[Taker], output: StepOutput) -> None:
    """Give the callers of steered requests their rows of the logits."""
    if output.logits is None:
        return
    steered = [(one, rows) for one, rows in takers if one.spec.steered]
    # A view spares the copy but keeps the whole step's logits alive: only where most of them are theirs.
    copy = bool(steered) and 2 * sum(len(rows) for _, rows in steered) < len(output.logits)
    for one, rows in steered:
        one.handle.offer_logits(output.logits[rows.start : rows.stop].to(torch.float32, copy=copy))


def draw_tokens(takers: Sequence[Taker], output: StepOutput, sampler: Sampler) -> list[Outcome]:
    """Draw for every request that caught up, steered ones excepted."""
    if output.logits is not None:
        return draw_rows([(one, rows) for one, rows in takers if not one.spec.steered], output.logits, sampler)
    tokens = output.argmax.tolist()
    if all([len(rows) == 1 for _, rows in takers]):
        return [Outcome(one, [tokens[rows.start]]) for one, rows in takers]
    drawn = Drawn.of_tokens(tokens)
    return [outcome_of(one, drawn, rows) for one, rows in takers]


def draw_rows(takers: Sequence[Taker], logits: torch.Tensor, sampler: Sampler) -> list[Outcome]:
    """Draw for requests, each from its rows of the logits."""
    indices = [row for _, rows in takers for row in rows]
    chosen = logits if indices == list(range(len(logits))) else logits[indices]
    drawn = sampler.draw(chosen, [row for one, rows in takers for row in _sample_rows(one, len(rows))])
    outcomes, first = [], 0
    for one, rows in takers:
        outcomes.append(outcome_of(one, drawn, range(first, first + len(rows))))
        first += len(rows)
    _add_logprobs(outcomes, [rows for _, rows in takers], logits)
    return outcomes


def _add_logprobs(outcomes: Sequence[Outcome], rows: Sequence[range], logits: torch.Tensor) -> None:
    """Score the new tokens of those that asked for it, all together."""
    wanted = [
        (outcome, row, token)
        for outcome, its_rows in zip(outcomes, rows, strict=True)
        if outcome.live.spec.logprobs is not None
        for row, token in zip(its_rows, outcome.tokens, strict=False)
    ]
    if wanted:
        takers, indices, tokens = zip(*wanted, strict=True)
        top = [outcome.live.spec.logprobs for outcome in takers]
        for outcome, logprob in zip(takers, token_logprobs(logits[list(indices)], tokens, top), strict=True):
            outcome.logprobs = [*outcome.logprobs, logprob]


def _sample_rows(live: LiveRequest, count: int) -> Iterable[SampleRow]:
    if count == 1:
        return (live.row,)
    # Only the number of tokens matters to rows that may speculate, and a range has one without a copy of the text.
    known = len(live.request.tokens)
    return (replace(live.row, tokens=range(length)) for length in range(known - count + 1, known + 1))


def outcome_of(live: LiveRequest, drawn: Drawn, places: range) -> Outcome:
    """What the draws at `places`, one behind each guess and one more, bring a request that waits for them."""
    known = len(live.request.tokens) - len(places) + 1
    drafts = live.request.tokens[known:]
    tokens: list[int] = []
    for place, draft in zip(places, [*drafts, None], strict=True):
        if drawn.errors[place] is not None:
            # Earlier draws stand; the row that failed will fail again as the first of the next step.
            return Outcome(live, tokens, error=None if tokens else drawn.errors[place], num_drafts=len(drafts))
        tokens.append(drawn.tokens[place])
        length = known + len(tokens)
        if drawn.tokens[place] != draft or live.spec.stop.ends_with(length, tokens[-1]):
            break
    kept = slice(places.start, places.start + len(tokens))
    return Outcome(live, tokens, drawn.scores[kept], drawn.logits[kept], num_drafts=len(drafts))

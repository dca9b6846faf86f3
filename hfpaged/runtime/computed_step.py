"""ComputedStep: a step that has been computed, and whose tokens were drawn, but that has not entered the books.

Its counterpart on a device that works behind the host is the `LaunchedStep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpaged.core.plan import Plan
from hfpaged.runtime.drawing import Outcome, Taker
from hfpaged.runtime.tier import StepOutput
from hfpaged.sampling.logprobs import TokenLogprob


@dataclass(frozen=True)
class ComputedStep:
    """What a step brings, all of it on the host.

    Attributes:
        plan: what was computed.
        output: of its forward.
        takers: the requests that caught up.
        outcomes: what was drawn for those of them whose caller does not draw.
        prompt_logprobs: of the prompt tokens that it scored, by request id.
    """

    plan: Plan
    output: StepOutput
    takers: Sequence[Taker]
    outcomes: Sequence[Outcome]
    prompt_logprobs: dict[int, list[TokenLogprob]]

    def sampled(self) -> dict[int, int | None]:
        """What to commit: each request's last new token, and None for those that wait for their caller."""
        sampled: dict[int, int | None] = {live.request.id: None for live, _ in self.takers}
        sampled.update((one.live.request.id, one.tokens[-1]) for one in self.outcomes if one.tokens)
        return sampled

    def accepted(self) -> dict[int, int]:
        """How many guesses stand, by id, of the requests that got a token behind theirs."""
        return {
            one.live.request.id: len(one.tokens) - 1
            for one in self.outcomes
            if one.tokens and one.live.request.draft_tokens
        }

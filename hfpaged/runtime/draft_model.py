"""DraftModel: a second, smaller model that guesses the tokens of many requests ahead, on paged blocks of its own.

It draws every token as the target will: with the same processors and with the noise of the same position. A guess then
stands if and only if it is what the target draws, so that neither the text nor its distribution depends on the draft;
the closer the two models, the more often they draw alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from hfpaged.core.request import Request
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.sampling.sampler import Sampler, SampleRow
from hfpaged.sampling.stop import StopRule
from hfpaged.speculation.draft_length import FIRST_RATE, Acceptance, DraftLength
from hfpaged.speculation.step_cost import StepCost

if TYPE_CHECKING:
    # Which itself speaks to draft models.
    from hfpaged.runtime.live_requests import LiveRequests

# A model guesses about as well all over a text, unlike what copies earlier parts of it, and where its guesses only just
# pay, a few wrong ones must not end them.
_MEMORY = 0.95
# Times what a round usually costs. More is counted as this much: something held it up, and if nobody guesses any more,
# nobody finds out.
_MOST_SURPRISE = 2.0


class DraftSteps(Protocol):
    """What a draft model needs of a `Stepper`, which it drives itself: there is no thread in between."""

    requests: LiveRequests

    def admit(self, specs: Sequence[RequestSpec], handles: Sequence[GenerationHandle]) -> None: ...
    def step(self) -> bool: ...
    def release(self) -> None: ...


@dataclass
class DraftedText:
    """One request of the target as the draft model follows it.

    Attributes:
        fed: tokens that the draft model was given, guesses at their end included.
        agreed: how many of them are known to be the target's.
        is_behind: it has not computed all of them yet.
        guesses: of the round that is going on.
        wanted: how many of them there should be.
    """

    request: Request
    spec: RequestSpec
    handle: GenerationHandle
    length: DraftLength
    fed: list[int]
    agreed: int = 0
    is_behind: bool = True
    guesses: list[int] = field(default_factory=list)
    wanted: int = 0

    @property
    def row(self) -> SampleRow:
        """How the next guess is drawn. Only the number of tokens matters to a request that may speculate."""
        spec = self.spec
        return SampleRow(range(len(self.fed)), spec.processors, spec.do_sample, spec.seed, spec.sample_index)


class DraftModel:
    """Used by the stepping thread of the target only.

    Args:
        steps: a stepper of the draft model.
        on_failure: told of each request that goes on without guesses because the draft model failed.
    """

    def __init__(self, steps: DraftSteps, on_failure: Callable[[], None]):
        self._steps = steps
        self._on_failure = on_failure
        self._sampler = Sampler()
        self._texts: dict[int, DraftedText] = {}
        # Of one guess for each of so many texts, in steps of the target at that time: machines are faster and slower,
        # and while nobody guesses only the target's steps show it.
        self._round_cost = StepCost()
        # Hopeful, so that the first texts show how good it is even where only a very good one pays.
        self._acceptance = Acceptance(rate=0.95, memory=0.98)

    def add(self, request: Request, spec: RequestSpec) -> None:
        """Follow a request from its first guess on."""
        # The draft model sees tokens only when it is first asked: until then the target has its prompt to compute.
        handle = GenerationHandle(request.id, len(request.tokens), lambda handle: None)
        length = DraftLength(spec.guesses.num_tokens, max(FIRST_RATE, self._acceptance.rate), _MEMORY)
        self._texts[request.id] = DraftedText(request, spec, handle, length, [])

    def forget(self, request_id: int) -> None:
        """The request ended."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._steps.requests.end([text.handle], "stop")

    def release(self) -> None:
        """Give up all blocks."""
        self._steps.release()

    def propose(
        self, limits: dict[int, int], costs: Sequence[float], target_seconds: float | None
    ) -> dict[int, list[int]]:
        """Guesses for requests that have one token left to compute.

        Args:
            limits: the most tokens that each may be given, by request id.
            costs: of guesses for the target, see `DraftLength.next`.
            target_seconds: how long a step of the target takes without guesses, if that is known.

        Returns:
            The guesses by request id; requests whose texts the draft model has still to read get none.
        """
        texts = [self._texts[request_id] for request_id in limits if request_id in self._texts]
        # A guess is paid for twice: here with its share of a round as well.
        round_cost = self._round_cost.time(len(texts)) or 0.0
        costs = [cost + guesses * round_cost for guesses, cost in enumerate(costs)]
        for text in texts:
            # A text that it has not begun to read is not read for one guess.
            wanted = text.length.next(costs, may_retry=bool(text.fed))
            text.guesses, text.wanted = [], min(wanted, limits[text.request.id])
        texts = [text for text in texts if text.wanted]
        reads_prompts = not all(text.fed for text in texts)
        for text in texts:
            self._catch_up(text)
        for _ in range(max((text.wanted for text in texts), default=0)):
            began = time.perf_counter()
            if not self._steps.step() or not self._guess(texts):
                break
            if target_seconds is not None and not reads_prompts:
                self._learn_cost(len(texts), (time.perf_counter() - began) / target_seconds)
        self._drop_failed(texts)
        return {text.request.id: text.guesses for text in texts if text.guesses}

    def learn(self, request_id: int, guessed: int, accepted: int) -> None:
        """How many of a request's guesses stood."""
        if request_id in self._texts:
            self._texts[request_id].length.learn(guessed, accepted)
            self._acceptance.learn(guessed, accepted)

    def _learn_cost(self, texts: int, cost: float) -> None:
        """A round of so many texts cost this many steps of the target."""
        usual = self._round_cost.time(texts)
        self._round_cost.record(texts, cost if usual is None else min(cost, _MOST_SURPRISE * usual))

    def _catch_up(self, text: DraftedText) -> None:
        """Give the draft model the text as the target has it: without the guesses that fell, with what came instead."""
        tokens = text.request.tokens
        if not text.fed:
            text.fed = list(tokens)
            text.agreed = len(tokens)
            spec = RequestSpec(
                prompt=list(tokens),
                max_tokens=text.spec.max_tokens,
                stop=StopRule(),
                thread_state=text.spec.thread_state,
                steered=True,
                cache_salt=text.spec.cache_salt,
                prefix_cache=text.spec.prefix_cache,
            )
            self._steps.admit([spec], [text.handle])
        elif not text.is_behind:
            stands = text.agreed
            while stands < min(len(text.fed), len(tokens) - 1) and text.fed[stands] == tokens[stands]:
                stands += 1
            self._steps.requests.rollback([text.handle], len(text.fed) - stands)
            self._steps.requests.feed([(text.handle, tokens[stands:])], 1)
            text.fed[stands:] = tokens[stands:]
            text.agreed = len(tokens)
            text.is_behind = True

    def _guess(self, texts: Sequence[DraftedText]) -> bool:
        """Draw one more guess of every text that the last step caught up with. Returns whether there was one."""
        ready = [(text, logits) for text in texts if (logits := text.handle.poll_logits()) is not None]
        if not ready:
            return False
        drawn = self._sampler.draw(torch.cat([logits for _, logits in ready]), [text.row for text, _ in ready])
        for (text, _), token, error in zip(ready, drawn.tokens, drawn.errors, strict=True):
            text.is_behind = False
            if error is not None or len(text.fed) < len(text.request.tokens):
                continue
            text.guesses.append(token)
            if len(text.guesses) < text.wanted:
                self._steps.requests.feed([(text.handle, [token])], 1)
                text.fed.append(token)
                text.is_behind = True
        return True

    def _drop_failed(self, texts: Sequence[DraftedText]) -> None:
        for text in texts:
            if text.handle.done:
                text.guesses = []
                del self._texts[text.request.id]
                self._on_failure()

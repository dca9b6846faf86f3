"""DraftLength: how many tokens to guess ahead, from how often guesses were right and from what a wrong one costs."""

from __future__ import annotations

from collections.abc import Sequence

# How fast earlier steps of a text are forgotten.
MEMORY = 0.8
# How often guesses are right before anything is known about them.
FIRST_RATE = 0.8
# Try again after so many steps without guesses, and after twice as many each time that this was in vain.
RETRY_AFTER = 32


class Acceptance:
    """How often guesses are right.

    Args:
        rate: what to begin with, as if five guesses had been judged so far.
        memory: how much of earlier steps counts at each new one.
    """

    def __init__(self, rate: float = FIRST_RATE, memory: float = MEMORY):
        self._right, self._judged = 5 * rate, 5.0
        self._memory = memory

    @property
    def rate(self) -> float:
        """From 0 to 0.99: nothing is certain."""
        return min(self._right / self._judged, 0.99)

    def learn(self, guessed: int, accepted: int) -> None:
        """Of the last `guessed` tokens the first `accepted` stood; what followed the first wrong one says nothing."""
        self._right = self._memory * self._right + accepted
        self._judged = self._memory * self._judged + min(guessed, accepted + 1)


class DraftLength:
    """Adapts to one text.

    Args:
        most: never guess more tokens than this.
        rate: how often its guesses are expected to be right.
        memory: how much of earlier steps counts at each new one.
    """

    def __init__(self, most: int, rate: float = FIRST_RATE, memory: float = MEMORY):
        self.most = most
        self._acceptance = Acceptance(rate, memory)
        self._idle_steps = 0
        self._retry_after = RETRY_AFTER

    def next(self, costs: Sequence[float], may_retry: bool = True) -> int:
        """Tokens to guess now, perhaps none: as many as bring the most tokens in the time of a step.

        Args:
            costs: what steps with 0, 1, ... guesses cost, in steps without; see `StepCost.of_guesses`.
            may_retry: now and then guess one token all the same, as the text may have become easier.
        """
        best = most_tokens_per_cost(self._acceptance.rate, costs[: self.most + 1])
        if best:
            return best
        self._idle_steps += 1
        if not may_retry or self._idle_steps < self._retry_after:
            return 0
        self._idle_steps = 0
        self._retry_after *= 2
        return 1

    def learn(self, guessed: int, accepted: int) -> None:
        """Of the last `guessed` tokens the first `accepted` stood."""
        self._acceptance.learn(guessed, accepted)
        if accepted:
            self._retry_after = RETRY_AFTER


def most_tokens_per_cost(rate: float, costs: Sequence[float]) -> int:
    """The number of guesses, each right with chance `rate` if those before it are, with the most tokens per cost."""
    best, best_value = 0, 1.0 / costs[0]
    tokens, chance = 1.0, 1.0
    for guesses, cost in enumerate(costs[1:], start=1):
        chance *= rate
        tokens += chance
        if tokens / cost > best_value:
            best, best_value = guesses, tokens / cost
    return best

"""DraftLength: how many tokens to guess ahead, from how often guesses were right and from what a wrong one costs."""

from __future__ import annotations

import math

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
    """

    def __init__(self, most: int, rate: float = FIRST_RATE):
        self.most = most
        self._acceptance = Acceptance(rate)
        self._idle_steps = 0
        self._retry_after = RETRY_AFTER

    def next(self, least_chance: float = 0.1, may_retry: bool = True) -> int:
        """Tokens to guess now, perhaps none: as far ahead as a guess is likely enough to stand.

        Args:
            least_chance: how likely that is, from 0 to 1; a guess that is less likely costs more than it brings. See
                `StepCost`.
            may_retry: now and then guess one token all the same, as the text may have become easier.
        """
        rate = self._acceptance.rate
        if rate >= least_chance:
            return max(1, min(self.most, int(math.log(least_chance) / math.log(rate))))
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

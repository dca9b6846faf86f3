"""DraftLength: how many tokens to guess ahead, from how often guesses were right."""

from __future__ import annotations

import math

# Guess as far ahead as the chance that all of it stands is at least this.
LEAST_CHANCE = 0.4
# Guesses that are right less often than this cost more than they bring.
LEAST_ACCEPTANCE = 0.3
# How fast earlier steps are forgotten.
MEMORY = 0.8
# After this many steps without guesses, try again.
RETRY_AFTER = 16


class DraftLength:
    """Adapts to one text.

    Args:
        most: never guess more tokens than this.
    """

    def __init__(self, most: int):
        self.most = most
        # As if four of five guesses had been right so far.
        self._right, self._judged = 4.0, 5.0
        self._idle_steps = 0

    def next(self) -> int:
        """Tokens to guess now, perhaps none."""
        acceptance = self._right / self._judged
        if acceptance >= LEAST_ACCEPTANCE:
            return max(1, min(self.most, int(math.log(LEAST_CHANCE) / math.log(min(acceptance, 0.99)))))
        self._idle_steps += 1
        return 0 if self._idle_steps % RETRY_AFTER else 1

    def learn(self, guessed: int, accepted: int) -> None:
        """Of the last `guessed` tokens the first `accepted` stood; what followed the first wrong one says nothing."""
        self._right = MEMORY * self._right + accepted
        self._judged = MEMORY * self._judged + min(guessed, accepted + 1)

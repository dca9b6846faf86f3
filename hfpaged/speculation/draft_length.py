"""DraftLength: how many tokens to guess ahead, from how often guesses were right and from what a wrong one costs."""

from __future__ import annotations

import math

# How fast earlier steps are forgotten.
MEMORY = 0.8
# After this many steps without guesses, try again.
RETRY_AFTER = 32


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

    def next(self, least_chance: float = 0.1) -> int:
        """Tokens to guess now, perhaps none: as far ahead as a guess is likely enough to stand.

        Args:
            least_chance: how likely that is, from 0 to 1; a guess that is less likely costs more than it brings. See
                `StepCost`.
        """
        acceptance = min(self._right / self._judged, 0.99)
        if acceptance >= least_chance:
            return max(1, min(self.most, int(math.log(least_chance) / math.log(acceptance))))
        self._idle_steps += 1
        return 0 if self._idle_steps % RETRY_AFTER else 1

    def learn(self, guessed: int, accepted: int) -> None:
        """Of the last `guessed` tokens the first `accepted` stood; what followed the first wrong one says nothing."""
        self._right = MEMORY * self._right + accepted
        self._judged = MEMORY * self._judged + min(guessed, accepted + 1)

"""StepCost: what one more token in a step costs, learned from the steps that run."""

from __future__ import annotations

from dataclasses import dataclass

# A step of one token costs about as much as this many more tokens, as long as that has not been measured: it reads the
# weights. Measured values stay within the bounds, whatever disturbs the measurement.
STEP_IN_TOKENS = 8.0
LEAST_STEP_IN_TOKENS, MOST_STEP_IN_TOKENS = 1.0, 32.0
# Steps up to this many times as large are looked at: some guesses for each request.
REACH = 8
# Weight of the newest step, by whether it was faster than those before: what disturbs a step makes it slower.
FASTER, SLOWER = 0.4, 0.1
# Steps of a size before its cost counts as known. The first ones pay for memory that is used for the first time.
ENOUGH_STEPS = 8


@dataclass
class SizeCost:
    """Steps of about the same number of tokens: smoothed tokens and seconds."""

    tokens: float
    seconds: float
    steps: int = 1

    def add(self, tokens: int, seconds: float) -> None:
        weight = max(FASTER if seconds < self.seconds else SLOWER, 1 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.steps += 1


class StepCost:
    """The cost of steps by their size, in classes of a factor of two."""

    def __init__(self) -> None:
        self._sizes: dict[int, SizeCost] = {}

    def record(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens in `seconds`."""
        size = self._sizes.get(tokens.bit_length())
        if size is None:
            self._sizes[tokens.bit_length()] = SizeCost(tokens, seconds)
        else:
            size.add(tokens, seconds)

    def seconds(self, tokens: int) -> float | None:
        """About how long a step of so many tokens takes; None if that is not known."""
        size = self._sizes.get(tokens.bit_length())
        return size.seconds if size is not None and size.steps >= ENOUGH_STEPS else None

    def least_chance(self, batch: int) -> float:
        """How likely a guess must be to be worth its place in a step of one token for each of `batch` requests.

        A step brings `batch` tokens in its time. One more token takes a little longer, and brings its chance of one.
        """
        return batch / (batch + self._step_in_tokens(batch))

    def _step_in_tokens(self, batch: int) -> float:
        """How many more tokens cost as much as a step costs before its first one."""
        classes = sorted(name for name, size in self._sizes.items() if size.steps >= ENOUGH_STEPS)
        known = [self._sizes[name] for name in classes if name >= batch.bit_length()]
        larger = [size for size in known[1:] if 1.5 <= size.tokens / known[0].tokens <= 2 * REACH]
        if not larger:
            return STEP_IN_TOKENS
        # Where the arithmetic of more tokens begins to cost more than reading the weights, their cost rises.
        one_more = max((size.seconds - known[0].seconds) / (size.tokens - known[0].tokens) for size in larger)
        if one_more <= 0:
            return MOST_STEP_IN_TOKENS
        measured = known[0].seconds / one_more - known[0].tokens
        return min(MOST_STEP_IN_TOKENS, max(LEAST_STEP_IN_TOKENS, measured))

"""StepCost: what more tokens in a step cost, learned from the steps that run."""

from __future__ import annotations

from dataclasses import dataclass

# A step of one token costs about as much as this many more tokens, as long as that has not been measured: it reads the
# weights. Measured costs stay within those of the bounds, whatever disturbs the measurement.
STEP_IN_TOKENS = 8.0
LEAST_STEP_IN_TOKENS, MOST_STEP_IN_TOKENS = 1.0, 32.0
# Weight of the newest step, by whether it was faster than those before: what disturbs a step makes it slower.
FASTER, SLOWER = 0.4, 0.1
# Steps of a size before its cost counts as known. The first ones pay for memory that is used for the first time.
ENOUGH_STEPS = 8


@dataclass
class SizeCost:
    """Steps of about the same number of tokens: smoothed tokens and time, and how many steps there were."""

    tokens: float
    time: float
    steps: int = 1

    def add(self, tokens: int, time: float) -> None:
        """One more step of about this size."""
        weight = max(FASTER if time < self.time else SLOWER, 1 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.time += weight * (time - self.time)
        self.steps += 1


class StepCost:
    """The cost of steps by their size, in classes of a factor of two.

    Times are in the unit in which they are recorded: seconds, or steps of another model.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, SizeCost] = {}

    def record(self, tokens: int, time: float) -> None:
        """A step computed `tokens` tokens in that time."""
        size = self._sizes.get(tokens.bit_length())
        if size is None:
            self._sizes[tokens.bit_length()] = SizeCost(tokens, time)
        else:
            size.add(tokens, time)

    def time(self, tokens: int) -> float | None:
        """About how long a step of so many tokens takes; None if that is not known."""
        size = self._sizes.get(tokens.bit_length())
        return size.time if size is not None and size.steps >= ENOUGH_STEPS else None

    def of_guesses(self, batch: int, most: int) -> list[float]:
        """How long a step takes in which each of `batch` requests has 0, 1, ... `most` guesses, in plain steps.

        Steps that were measured are points of a curve; sizes that were not are on the lines between and behind them.
        """
        points = self._points(batch)
        costs = [1.0]
        for guesses in range(1, most + 1):
            tokens = batch * (1 + guesses)
            dearest, assumed, cheapest = (
                (size + tokens) / (size + batch) for size in (LEAST_STEP_IN_TOKENS, STEP_IN_TOKENS, MOST_STEP_IN_TOKENS)
            )
            measured = _on_lines(points, tokens) / points[0][1] if len(points) > 1 else assumed
            costs.append(min(dearest, max(cheapest, measured)))
        return costs

    def _points(self, batch: int) -> list[tuple[float, float]]:
        """(tokens, time) of what is known of steps of one token a request and of larger ones, the smallest first."""
        if self.time(batch) is None:
            return []
        known = (size for name, size in self._sizes.items() if name >= batch.bit_length())
        return sorted((size.tokens, size.time) for size in known if size.steps >= ENOUGH_STEPS)


def _on_lines(points: list[tuple[float, float]], tokens: int) -> float:
    """The time at `tokens`, by the line through the two points around it, or through the first or last two."""
    upper = next((index for index in range(1, len(points)) if points[index][0] >= tokens), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

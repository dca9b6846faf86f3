"""The cost of a guess follows from steps that ran, and no disturbance takes it out of bounds."""

from __future__ import annotations

import random

import pytest

from hfpaged.speculation.step_cost import (
    ENOUGH_STEPS,
    LEAST_STEP_IN_TOKENS,
    MOST_STEP_IN_TOKENS,
    STEP_IN_TOKENS,
    StepCost,
)


def measured(before_first: float, per_token: float, sizes=(1, 4, 16, 60), noise: float = 0.0) -> StepCost:
    """Of a machine whose steps take so many seconds before the first token, and for each."""
    cost, source = StepCost(), random.Random(3)
    for size in sizes:
        cost.record(size, 10.0)
        for _ in range(50):
            seconds = before_first + per_token * size
            cost.record(size, seconds * (1 + noise * source.random()))
    return cost


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_guesses_cost_what_steps_of_their_size_do(batch, noise):
    got = measured(0.020, 0.0014, noise=noise).of_guesses(batch, 3)
    assert got == pytest.approx([(14.3 + batch * size) / (14.3 + batch) for size in (1, 2, 3, 4)], rel=0.12)


def test_between_and_behind_what_was_measured_the_cost_is_on_lines():
    """Eight tokens more are cheap on this machine, and forty are not."""
    cost = StepCost()
    for size, seconds in ((8, 0.020), (16, 0.026), (48, 0.070)):
        for _ in range(20):
            cost.record(size, seconds)
    assert cost.of_guesses(8, 6) == pytest.approx([1, 1.3, 1.85, 2.4, 2.95, 3.5, 4.05])


def test_before_it_is_measured_the_cost_is_a_guess():
    few = StepCost()
    for size in (1, 16):
        for _ in range(ENOUGH_STEPS - 1):
            few.record(size, 0.1)
    for cost in (few, measured(0.02, 0.001, sizes=(1,)), measured(0.02, 0.001, sizes=(1, 4))):
        assert cost.of_guesses(16, 2) == [1, *((STEP_IN_TOKENS + size) / (STEP_IN_TOKENS + 16) for size in (32, 48))]


@pytest.mark.parametrize("before_first, per_token", [(1.0, 0.0), (1.0, -0.01), (0.0, 1.0), (0.01, 1.0)])
def test_the_cost_stays_within_bounds(before_first, per_token):
    _, one, two = measured(before_first, per_token).of_guesses(4, 2)
    for cost, tokens in ((one, 8), (two, 12)):
        cheapest, dearest = ((size + tokens) / (size + 4) for size in (MOST_STEP_IN_TOKENS, LEAST_STEP_IN_TOKENS))
        assert cheapest <= cost <= dearest


def test_it_follows_a_machine_that_becomes_slower():
    cost = measured(0.02, 0.001)
    for _ in range(60):
        cost.record(16, 0.072)
    assert cost.time(16) == pytest.approx(0.072, rel=0.01)
    assert cost.time(300) is None

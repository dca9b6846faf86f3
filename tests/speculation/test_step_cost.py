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
def test_a_guess_must_be_as_likely_as_its_cost_in_steps(batch, noise):
    assert measured(0.020, 0.0014, noise=noise).least_chance(batch) == pytest.approx(batch / (batch + 14.3), rel=0.25)


def test_where_tokens_are_cheap_guesses_need_little_chance():
    cheap, dear = measured(0.020, 0.0007), measured(0.020, 0.004)
    assert cheap.least_chance(16) < StepCost().least_chance(16) < dear.least_chance(16)


def test_guesses_are_judged_by_the_step_that_all_of_them_would_make():
    """Eight tokens more are nearly free on this machine, and forty are not."""
    cost = StepCost()
    for size, seconds in ((8, 0.020), (16, 0.022), (48, 0.070)):
        for _ in range(20):
            cost.record(size, seconds)
    assert cost.least_chance(8) == pytest.approx(8 / (8 + 0.020 / 0.00125 - 8))


def test_before_it_is_measured_the_cost_is_a_guess():
    few = StepCost()
    for size in (1, 16):
        for _ in range(ENOUGH_STEPS - 1):
            few.record(size, 0.1)
    for cost in (few, measured(0.02, 0.001, sizes=(1,)), measured(0.02, 0.001, sizes=(1, 4))):
        assert cost.least_chance(16) == 16 / (16 + STEP_IN_TOKENS)


@pytest.mark.parametrize("before_first, per_token", [(1.0, 0.0), (1.0, -0.01), (0.0, 1.0)])
def test_the_cost_stays_within_bounds(before_first, per_token):
    chance = measured(before_first, per_token).least_chance(4)
    assert 4 / (4 + MOST_STEP_IN_TOKENS) <= chance <= 4 / (4 + LEAST_STEP_IN_TOKENS)


def test_it_follows_a_machine_that_becomes_slower():
    cost = measured(0.02, 0.001)
    for _ in range(60):
        cost.record(16, 0.072)
    assert cost.seconds(16) == pytest.approx(0.072, rel=0.01)
    assert cost.seconds(300) is None

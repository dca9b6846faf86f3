"""Engines over the Triton kernels: text equal to stock's, steps ahead and captured ones."""

from __future__ import annotations

import pytest
from batches import random_prompts
from families import build_tiny
from generation.test_parity import Case, counters

import hfpaged

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_text_is_stocks(family, stock_greedy):
    model = build_tiny(family)
    prompts = random_prompts((3, 16, 33), common_prefix=16)
    case = Case(model, prompts, [stock_greedy(model, prompt, 5) for prompt in prompts], 5)
    with hfpaged.patched(model, max_batch_tokens=20):
        case.check(case.generate_batch())
        counted = counters(case)
    assert counted["backend"] == "triton", counted["backend_reasons"]
    assert counted["steps_ahead"] > 0
    assert counted["captured_steps"] > 0 or counted["capture_problem"]
    assert not counted["fallbacks"]


def test_preempted_text_is_stocks(stock_greedy):
    model = build_tiny("llama", num_hidden_layers=2)
    prompts = random_prompts((20, 33, 30), common_prefix=16)
    case = Case(model, prompts, [stock_greedy(model, prompt, 6) for prompt in prompts], 6)
    with hfpaged.patched(model, num_blocks=5, preemption="swap"):
        case.check(case.generate_batch())
        assert counters(case)["preemptions_swap"] > 0

"""Engines over the Triton kernels: text equal to stock's, steps ahead and captured ones."""

from __future__ import annotations

import pytest
from batches import left_padded, random_prompts
from families import build_tiny
from generation.test_parity import Case, counters

import hfpaged
from hfpaged.runtime.device import ahead_tier, draw_launch
from hfpaged.runtime.device.draw_launch import DrawChoice, draw_by_kernel

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


SAMPLED = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0, "hfpaged": {"seed": 7}}


def test_rows_draw_by_the_kernel_in_captured_steps(machine, monkeypatch):
    def draw(*arguments):
        if machine.recorder is not None:
            return machine.recorder.run_opaque(lambda: draw_by_kernel(*arguments))
        return draw_by_kernel(*arguments)

    monkeypatch.setattr(draw_launch, "BLOCK", 256)
    monkeypatch.setattr(ahead_tier, "choose_draw", lambda *_: DrawChoice(draw, None))
    model = build_tiny("llama", num_hidden_layers=2)
    prompts = random_prompts((3, 16, 20))
    call = {**left_padded(prompts), **SAMPLED, "temperature": 1.4, "top_k": 40, "top_p": 0.9}
    with hfpaged.patched(model, attention_backend="torch"):
        want = model.generate(**call)
    with hfpaged.patched(model):
        assert model.generate(**call).tolist() == want.tolist()
        counted = hfpaged.engine(model).stats()
    assert counted["captured_steps"] > 0, counted["capture_problem"]
    assert not any(reason.startswith("draws") for reason in counted["tier_refusals"])
    assert counted["host_drawn_tokens"] == 0

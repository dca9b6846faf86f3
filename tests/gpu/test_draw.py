"""Tokens that the device draws: by the kernel, by PyTorch, in captured steps and behind guesses."""

from __future__ import annotations

import pytest
import torch
from batches import random_prompts
from gpu.draws import mixture
from gpu.shapes import random_model
from gpu.test_engine import texts
from internals import workspace_of

import hfpaged
from hfpaged.runtime.device.draw_launch import choose_draw
from hfpaged.sampling.device_draw import draw_on_device

SAMPLING = {"do_sample": True, "temperature": 0.4, "top_k": 50, "top_p": 0.95, "hfpaged": {"seed": 3}}


@pytest.mark.parametrize("vocabulary", [32000, 128256])
def test_the_kernel_draws_what_sorting_draws(gpu, vocabulary):
    draw, problem = choose_draw(gpu, torch.bfloat16)
    assert problem is None
    arguments = mixture(256, vocabulary, gpu)
    ours, sorted_ones = draw(*arguments), draw_on_device(*arguments)
    # Sums of a whole vocabulary in float32, as PyTorch's, may cut next to where they should.
    assert (ours == sorted_ones).sum() >= 254
    # Whatever else is in the batch.
    alone = torch.cat(
        [
            draw(
                *(part[..., row : row + 1] if part.dim() == 1 else part[row : row + 1] for part in arguments[:2]),
                arguments[2][:, row : row + 1],
            )
            for row in range(8)
        ]
    )
    assert torch.equal(alone, ours[:8])


@pytest.mark.slow
def test_guesses_are_verified_by_draws_in_captured_steps(device):
    model = random_model("tiny", device, torch.bfloat16)
    prompts = [(prompt * 8)[:40] for prompt in random_prompts((6, 5, 4))]
    with hfpaged.patched(model, num_blocks=512):
        want = texts(model, prompts, 24, **SAMPLING)
        got = texts(model, prompts, 24, prompt_lookup_num_tokens=3, **SAMPLING)
        counted = hfpaged.engine(model).stats()
    assert counted["draft_tokens"] > 0
    assert counted["host_drawn_tokens"] == 0
    assert counted["captured_steps"] > 0, counted["capture_problem"]
    # A rounding of logits may send one draw elsewhere, and all that follow it in its row.
    assert sum(one == other for one, other in zip(got, want, strict=True)) >= 2


@pytest.mark.slow
def test_mixtures_share_the_captured_draws(device):
    model = random_model("tiny", device, torch.bfloat16)
    prompts = random_prompts((5, 16, 33, 20))
    with hfpaged.patched(model, num_blocks=512, max_requests=4):
        engine = hfpaged.engine(model)
        engine.warm_up()
        captured = workspace_of(engine).tier.captured
        slots = dict(captured._slots)
        assert all(slot.draws is not None for slot in slots.values())
        options = {"eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 12}
        rows = [{**options, **one} for one in ({"do_sample": False}, SAMPLING, {**SAMPLING, "top_k": 0}, SAMPLING)]
        alone = [engine.submit(prompt, **one).result(60) for prompt, one in zip(prompts, rows, strict=True)]
        handles = [engine.submit(prompt, **one) for prompt, one in zip(prompts, rows, strict=True)]
        together = [handle.result(60) for handle in handles]
        assert captured._slots == slots
    assert sum(one == other for one, other in zip(alone, together, strict=True)) >= 3


def test_steps_that_swap_do_not_wait(gpu):
    from gpu.test_engine import without_waiting

    model = random_model("tiny", gpu, torch.bfloat16)
    prompts = random_prompts((20, 33, 47, 64), common_prefix=16)
    with hfpaged.patched(model, num_blocks=9, preemption="swap"):
        want = texts(model, prompts, 24)
        runner = workspace_of(hfpaged.engine(model)).runner
        runner.run = without_waiting(runner.run)
        before = hfpaged.engine(model).stats()["preemptions_swap"]
        assert sum(one == other for one, other in zip(texts(model, prompts, 24), want, strict=True)) >= 3
        assert hfpaged.engine(model).stats()["preemptions_swap"] > before > 0

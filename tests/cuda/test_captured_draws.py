"""What the device draws in captured steps: a second graph behind that of the forward, for all mixtures of options."""

from __future__ import annotations

import torch
from batches import left_padded, random_prompts
from standin.captured import NEW, mixture, stock, together

SAMPLED = (
    {},
    {"do_sample": True, "temperature": 1.5, "top_k": 20, "hfpaged": {"seed": 3}},
    {"do_sample": True, "temperature": 1.2, "top_k": 0, "top_p": 0.8, "hfpaged": {"seed": 4}},
    {"do_sample": True, "temperature": 2.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "hfpaged": {"seed": 5}},
    {"do_sample": True, "top_k": 0, "hfpaged": {"seed": 6}},
)


def test_what_rows_draw_in_captured_steps_is_what_the_host_draws_and_no_mixture_needs_another_capture(patched, cuda):
    prompts = random_prompts((20, 5, 9, 14))
    _, engine = patched()
    _, plain = patched(attention_backend="torch")
    for _ in range(3):
        assert mixture(engine, SAMPLED[:1] * 4, prompts) == stock("llama", prompts)
    greedy, captures = cuda.device.captures, []
    for options in (SAMPLED[:4], SAMPLED[1:], SAMPLED[3::-1], (*SAMPLED[4:], *SAMPLED[:3]), SAMPLED[:1] * 4):
        assert mixture(engine, options, prompts) == mixture(plain, options, prompts)
        captures.append(cuda.device.captures)
    # The draws, once they were needed.
    assert captures == [greedy + 1] * 5
    assert engine.stats()["host_drawn_tokens"] == 0


def test_greedy_steps_leave_the_draws_out(patched, cuda):
    prompts = random_prompts((20, 5))
    _, engine = patched()
    mixture(engine, SAMPLED[:2], prompts)
    replays, steps = cuda.device.replays, engine.stats()["captured_steps"]
    mixture(engine, SAMPLED[:2], prompts)
    assert cuda.device.replays - replays == 2 * (engine.stats()["captured_steps"] - steps)
    replays, steps = cuda.device.replays, engine.stats()["captured_steps"]
    together(engine, prompts)
    assert cuda.device.replays - replays == engine.stats()["captured_steps"] - steps


def test_rows_that_others_draw_for_are_captured_with_those_that_draw(patched):
    """The host draws the third row, whose place in the step is between the others."""
    prompts = random_prompts((20, 5, 9, 14))
    options = (*SAMPLED[:2], {**SAMPLED[2], "repetition_penalty": 1.3}, SAMPLED[3])
    _, engine = patched()
    _, plain = patched(attention_backend="torch")
    assert mixture(engine, options, prompts) == mixture(plain, options, prompts)
    assert engine.stats()["host_drawn_tokens"] == NEW
    assert engine.stats()["captured_steps"] > NEW


def test_guesses_are_verified_by_draws_in_the_captured_step(patched):
    """Each row of a request draws with the noise of its own position, so that guessing changes nothing."""
    prompts = [(prompt * 6)[:30] for prompt in random_prompts((4, 5, 6))]
    call = {**left_padded(prompts), "max_new_tokens": 3 * NEW, "eos_token_id": -1, "pad_token_id": 0}
    model, engine = patched()
    plain, _ = patched(attention_backend="torch")
    for options in SAMPLED[1:4]:
        options = {**options, "temperature": 0.3}
        want = plain.generate(**call, **options)
        before = engine.stats()
        found = model.generate(**call, prompt_lookup_num_tokens=3, **options)
        assert torch.equal(found, want)
        after = engine.stats()
        assert after["draft_tokens"] - before["draft_tokens"] > after["accepted_tokens"] - before["accepted_tokens"] > 0
        assert after["captured_steps"] > before["captured_steps"]
    assert engine.stats()["host_drawn_tokens"] == 0


def test_draws_that_cannot_be_captured_are_made_behind_the_replay(patched, cuda):
    prompts = random_prompts((20, 5))
    _, engine = patched()
    _, plain = patched(attention_backend="torch")
    together(engine, prompts)
    cuda.device.fails_to_capture = True
    assert mixture(engine, SAMPLED[1:3], prompts) == mixture(plain, SAMPLED[1:3], prompts)
    counted = engine.stats()
    assert counted["capture_problem"].startswith("the draw cannot be captured (RuntimeError")
    assert counted["captured_steps"] > NEW

"""Steps launched before the tokens of the one before are known: equal texts, late by a step where the host decides."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from batches import alone, left_padded, new_tokens, random_prompts
from engine.hooks import WAIT_SECONDS, at_rest, paused, used_blocks
from families import build_tiny
from generation.conftest import tokenizer
from internals import workspace_of
from transformers import StoppingCriteria

import hfpaged

__all__ = ["tokenizer"]

PROMPTS = random_prompts((20, 5, 33, 16))
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
NEW = 12


@pytest.fixture
def model(cuda):
    model = build_tiny("llama")
    model.patch()
    yield model
    assert at_rest(hfpaged.engine(model))
    model.unpatch()


@pytest.fixture(scope="module")
def texts():
    """What stock gives each prompt alone."""
    stock = build_tiny("llama")
    return [alone(stock, prompt, max_new_tokens=NEW, **GREEDY) for prompt in PROMPTS]


def stats(model):
    return hfpaged.engine(model).stats()


def batch(model, **options):
    options = {"max_new_tokens": NEW, **GREEDY, **options}
    return new_tokens(model.generate(**left_padded(PROMPTS), **options), PROMPTS)


def test_steps_are_launched_ahead(model, texts):
    assert batch(model) == texts
    counted = stats(model)
    assert counted["backend"] == "flashinfer"
    assert counted["steps_ahead"] == counted["steps"] - 1
    assert counted["steps"] == NEW
    assert counted["host_drawn_tokens"] == counted["dropped_tokens"] == 0


def test_a_launch_comes_before_the_tokens_of_the_step_before_are_read(model, texts):
    """The order of things, step by step."""
    batch(model)
    workspace = workspace_of(hfpaged.engine(model))
    events = []
    run, launch = workspace.runner.run, workspace.launcher.launch

    def noted_launch(*args):
        step = launch(*args)
        synchronize = step.mark.synchronize
        step.mark = type("Mark", (), {"synchronize": lambda self: (events.append("read"), synchronize())})()
        return step

    workspace.runner.run = lambda *args: (events.append("launch"), run(*args))[1]
    workspace.launcher.launch = noted_launch
    assert batch(model) == texts
    assert events == ["launch", *["launch", "read"] * (NEW - 1), "read"]


def test_the_end_of_a_text_is_seen_a_step_late_and_its_surplus_dropped(model, texts):
    end = texts[0][4]
    cut = texts[0][: texts[0].index(end) + 1]
    assert alone(model, PROMPTS[0], max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0) == cut
    assert at_rest(hfpaged.engine(model))
    assert stats(model)["dropped_tokens"] == 1
    assert stats(model)["generated_tokens"] == len(cut)
    assert used_blocks(hfpaged.engine(model)) == 0


def test_a_length_is_known_ahead(model):
    alone(model, PROMPTS[0], max_new_tokens=NEW, **GREEDY)
    assert stats(model)["steps"] == NEW
    assert stats(model)["dropped_tokens"] == 0


class Ends(StoppingCriteria):
    """Ends every row at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_criteria_end_a_text_where_stock_does(model, texts):
    text = alone(model, PROMPTS[0], stopping_criteria=[Ends(24)], max_new_tokens=NEW, **GREEDY)
    assert text == texts[0][:4]


def test_stop_strings_drop_what_came_too_late(model, texts, tokenizer):
    stop = tokenizer.decode(texts[0][3:5])
    handle = hfpaged.engine(model).submit(
        PROMPTS[0], stop_strings=stop, tokenizer=tokenizer, max_new_tokens=NEW, **GREEDY
    )
    assert list(handle) == handle.result(WAIT_SECONDS) == texts[0][:5]
    assert handle.finish_reason == "stop"
    assert at_rest(hfpaged.engine(model))
    assert stats(model)["dropped_tokens"] == 1


def test_max_time_ends_a_text_a_step_late_at_most(model):
    began = time.perf_counter()
    handle = hfpaged.engine(model).submit(PROMPTS[0], max_time=0.05, max_new_tokens=400, **GREEDY)
    assert len(handle.result(WAIT_SECONDS)) < 400
    assert time.perf_counter() - began < WAIT_SECONDS


def test_a_processor_of_the_host_takes_every_other_step_and_nobody_else_does(model, texts, cuda):
    stock = build_tiny("llama")
    want = alone(stock, PROMPTS[1], max_new_tokens=NEW, repetition_penalty=1.5, **GREEDY)
    engine = hfpaged.engine(model)
    engine.submit(PROMPTS[3], max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    before = stats(model)
    with paused(engine):
        plain = engine.submit(PROMPTS[0], max_new_tokens=2 * NEW, **GREEDY)
        penalised = engine.submit(PROMPTS[1], max_new_tokens=NEW, repetition_penalty=1.5, **GREEDY)
    assert penalised.result(WAIT_SECONDS) == want
    assert plain.result(WAIT_SECONDS)[:NEW] == texts[0]
    after = stats(model)
    assert after["host_drawn_tokens"] - before["host_drawn_tokens"] == NEW
    assert after["steps"] - before["steps"] == 2 * NEW
    # Drawing for it does not wait for the step that is running.
    assert cuda.device.turns_beside == NEW


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 1.3, "top_k": 0, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 5000},
    ],
    ids=str,
)
def test_samples_are_those_that_the_host_draws(model, options):
    call = {"do_sample": True, "hfpaged": {"seed": 11}, **options}
    drawn = batch(model, **call)
    assert stats(model)["host_drawn_tokens"] == 0
    elsewhere = build_tiny("llama")
    elsewhere.patch(attention_backend="torch")
    assert drawn == batch(elsewhere, **call)
    elsewhere.unpatch()
    assert [alone(model, p, max_new_tokens=NEW, **{**GREEDY, **call}) for p in PROMPTS[:1]] == drawn[:1]


def test_rows_of_one_call_that_sample_differently_share_steps(model):
    engine = hfpaged.engine(model)
    options = [
        {"do_sample": True, "temperature": 1.5, "hfpaged": {"seed": 1}},
        {"do_sample": False},
        {"do_sample": True, "top_k": 3, "hfpaged": {"seed": 2}},
        {"do_sample": True, "top_p": 0.5, "hfpaged": {"seed": 3}},
    ]
    rows = list(zip(PROMPTS, [{**GREEDY, "max_new_tokens": NEW, **one} for one in options], strict=True))
    want = [engine.submit(prompt, **one).result(WAIT_SECONDS) for prompt, one in rows]
    with paused(engine):
        handles = [engine.submit(prompt, **one) for prompt, one in rows]
    assert [handle.result(WAIT_SECONDS) for handle in handles] == want


def test_prompt_lookup_verifies_its_guesses_and_the_counts_are_right(model):
    stock = build_tiny("llama")
    prompt = (PROMPTS[0][:6] * 6)[:30]
    want = alone(stock, prompt, max_new_tokens=40, **GREEDY)
    assert alone(model, prompt, max_new_tokens=40, prompt_lookup_num_tokens=3, **GREEDY) == want
    counted = stats(model)
    assert 0 <= counted["accepted_tokens"] <= counted["draft_tokens"]
    assert counted["draft_tokens"] > 0
    assert counted["generated_tokens"] == 40


def test_a_draft_model_guesses_right_away_though_the_device_is_behind(model, texts):
    draft = build_tiny("llama")
    options = {"assistant_model": draft, "num_assistant_tokens": 3}
    assert batch(model, **options) == texts
    counted = stats(model)
    # The same weights: all guesses stand, and there is one in most steps.
    assert counted["accepted_tokens"] == counted["draft_tokens"] > len(PROMPTS) * NEW / 2
    assert counted["generated_tokens"] == len(PROMPTS) * NEW


def test_several_sequences_from_one_prompt(model):
    call = {"do_sample": True, "num_return_sequences": 4, "hfpaged": {"seed": 5}, "temperature": 1.5}
    out = model.generate(**left_padded(PROMPTS[:2]), max_new_tokens=NEW, **{**GREEDY, **call})
    elsewhere = build_tiny("llama")
    elsewhere.patch(attention_backend="torch")
    want = elsewhere.generate(**left_padded(PROMPTS[:2]), max_new_tokens=NEW, **{**GREEDY, **call})
    elsewhere.unpatch()
    assert torch.equal(out, want)
    assert len({tuple(row) for row in out.tolist()}) > 4


def test_more_draws_than_a_step_takes_are_the_hosts(cuda):
    model = build_tiny("llama")
    with hfpaged.patched(model, max_requests=1):
        call = {"do_sample": True, "num_return_sequences": 6, "hfpaged": {"seed": 5}}
        out = model.generate(**left_padded(PROMPTS[:1]), max_new_tokens=3, **{**GREEDY, **call})
        assert out.shape == (6, 23)
        assert stats(model)["host_drawn_tokens"] == 2


def test_scores_and_logprobs(model, texts, cuda):
    out = model.generate(
        **left_padded(PROMPTS[:1]), max_new_tokens=4, return_dict_in_generate=True, output_scores=True, **GREEDY
    )
    stock = build_tiny("llama").generate(
        **left_padded(PROMPTS[:1]), max_new_tokens=4, return_dict_in_generate=True, output_scores=True, **GREEDY
    )
    for mine, theirs in zip(out.scores, stock.scores, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    # Scores and logits were computed beside the stream that callers work on.
    assert len(cuda.device.handed_over) == 2 * 4


def test_cancelling_with_a_step_in_flight_frees_everything(model):
    engine = hfpaged.engine(model)
    handles = [engine.submit(prompt, max_new_tokens=400, **GREEDY) for prompt in PROMPTS]
    for handle in handles:
        next(iter(handle))
    for handle in handles:
        handle.cancel()
    engine.check()
    assert used_blocks(engine) == 0


def test_a_step_whose_tokens_cannot_be_read_fails_its_requests_and_the_engine_lives_on(model, texts):
    engine = hfpaged.engine(model)
    engine.submit(PROMPTS[3], max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    workspace = workspace_of(engine)
    launch, count = workspace.launcher.launch, iter(range(100))

    def failing(*args):
        step = launch(*args)
        if next(count) == 3:

            class Broken:
                def synchronize(self):
                    raise RuntimeError("an illegal memory access was encountered")

            step.mark = Broken()
        return step

    workspace.launcher.launch = failing
    handle = engine.submit(PROMPTS[0], max_new_tokens=NEW, **GREEDY)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        handle.result(WAIT_SECONDS)
    assert handle.tokens == texts[0][:3]
    assert engine.submit(PROMPTS[0], max_new_tokens=NEW, **GREEDY).result(WAIT_SECONDS) == texts[0]
    assert stats(model)["failed_steps"] == 1


def test_a_row_that_cannot_be_drawn_on_the_device_fails_alone(model, texts):
    engine = hfpaged.engine(model)
    engine.submit(PROMPTS[3], max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    tier = workspace_of(engine).tier
    forward = tier._packed

    def poisoned(token_ids, positions, rows):
        logits = forward(token_ids, positions, rows)
        return logits.index_fill(0, torch.zeros(1, dtype=torch.long), float("nan")) if len(rows) == 2 else logits

    tier._packed = poisoned
    with paused(engine):
        bad = engine.submit(PROMPTS[1], max_new_tokens=NEW, **{**GREEDY, "do_sample": True})
        good = engine.submit(PROMPTS[0], max_new_tokens=NEW, **GREEDY)
    with pytest.raises(RuntimeError, match="cannot sample"):
        bad.result(WAIT_SECONDS)
    tier._packed = forward
    assert good.result(WAIT_SECONDS) == texts[0]


def test_release_with_a_step_in_flight(model, texts):
    engine = hfpaged.engine(model)
    handle = engine.submit(PROMPTS[0], max_new_tokens=400, **GREEDY)
    next(iter(handle))
    engine.release()
    with pytest.raises(hfpaged.errors.EngineReleasedError):
        handle.result(WAIT_SECONDS)
    assert engine.submit(PROMPTS[0], max_new_tokens=NEW, **GREEDY).result(WAIT_SECONDS) == texts[0]


def test_threads(model, texts):
    outcomes = []

    def user(index):
        for _ in range(4):
            outcomes.append(alone(model, PROMPTS[index], max_new_tokens=NEW, **GREEDY) == texts[index])

    users = [threading.Thread(target=user, args=(index,)) for index in range(4)]
    for one in users:
        one.start()
    for one in users:
        one.join(WAIT_SECONDS)
    assert outcomes == [True] * 16

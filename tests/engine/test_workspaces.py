"""Requests that may not share a step run side by side: other autocast, or a model that changed meanwhile."""

from __future__ import annotations

import copy
import threading

import torch
from batches import alone, left_padded
from engine.hooks import WAIT_SECONDS, after_each_step, at_rest
from engine.three_prompts import GREEDY, PROMPTS, autocast, texts
from transformers import LogitsProcessor


def test_requests_under_autocast_never_share_a_step_with_others(patched):
    model, engine = patched()
    plain = texts(model)
    with autocast():
        cast = texts(model)
    mixed, computed = [], {}

    def states():
        """Of the requests that the step moved on."""
        moved = set()
        for request_id, live in engine._stepper.live.items():
            if live.request.computed != computed.get(request_id, 0):
                moved.add(live.spec.thread_state.autocast_dtype)
            computed[request_id] = live.request.computed
        return moved

    def user(under_autocast):
        for _ in range(3):
            if under_autocast:
                with autocast():
                    mixed.append(texts(model) == cast)
            else:
                mixed.append(texts(model) == plain)

    users = [threading.Thread(target=user, args=(index % 2 == 0,)) for index in range(4)]
    with after_each_step(engine, states) as seen:
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(WAIT_SECONDS)
    assert mixed == [True] * 12
    assert len(computed) > 30
    assert {torch.bfloat16} in seen
    assert {None} in seen
    assert all(len(step) <= 1 for step in seen)


def test_autocast_is_not_kept_waiting_by_a_stream_of_others(patched):
    """Others come and go without a gap; the one under autocast gets its turn all the same."""
    model, _ = patched()
    with autocast():
        want = texts(model)
    stop = threading.Event()

    def user(num_tokens):
        while not stop.is_set():
            alone(model, PROMPTS[0], **{**GREEDY, "max_new_tokens": num_tokens})

    outcome = []

    def cast_user():
        with autocast():
            outcome.append(texts(model))

    # Of lengths that keep them from ending together.
    others = [threading.Thread(target=user, args=(num_tokens,)) for num_tokens in (300, 400)]
    patient = threading.Thread(target=cast_user)
    for thread in (*others, patient):
        thread.start()
    patient.join(10)
    stop.set()
    for thread in others:
        thread.join(WAIT_SECONDS)
    assert outcome == [want]


def test_generate_under_autocast_inside_a_processor_does_not_deadlock(patched):
    model, _ = patched()

    class Inner(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with autocast():
                model.generate(input_ids[:1, -3:], max_new_tokens=2, do_sample=False)
            return scores

    outcome = []
    options = {**left_padded(PROMPTS), **GREEDY}
    want = model.generate(**options)
    call = threading.Thread(
        target=lambda: outcome.append(model.generate(**options, logits_processor=[Inner()])), daemon=True
    )
    call.start()
    call.join(10)
    assert outcome, "deadlock"
    assert torch.equal(outcome[0], want)


def test_requests_that_run_while_the_config_changes_end_as_they_began(patched):
    model, engine = patched("granite")
    long = {**GREEDY, "max_new_tokens": 300}
    want_before = alone(copy.deepcopy(model), PROMPTS[0], **long)
    running = engine.submit(PROMPTS[0], **long)
    next(iter(running))
    model.config.logits_scaling, model.config.residual_multiplier = 0.5, 2.0
    for layer in model.model.layers:
        layer.residual_multiplier = 2.0
    want_after = [alone(copy.deepcopy(model), prompt, **GREEDY) for prompt in PROMPTS]
    assert texts(model) == want_after
    assert running.result(WAIT_SECONDS) == want_before
    assert want_after[0] != want_before[:12]
    assert at_rest(engine)
    assert len(engine._stepper.workspaces) == 1


def test_workspaces_of_requests_that_ended_are_dropped(patched):
    model, engine = patched(num_blocks=40)
    texts(model)
    running = engine.submit(PROMPTS[0], **{**GREEDY, "max_new_tokens": 300})
    next(iter(running))
    with autocast():
        texts(model)
        assert engine.stats()["blocks_total"] == 80
    running.cancel()
    assert at_rest(engine)
    assert engine.stats()["blocks_total"] == 40
    generated = engine.stats()["generated_tokens"]
    engine.release()
    assert engine.stats()["generated_tokens"] == generated

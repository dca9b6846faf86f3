"""PyTorch's thread-local state: autocast is the request's own, and nothing of inference mode outlives a call."""

from __future__ import annotations

import copy
import gc
import threading
import types

import pytest
import torch
from batches import alone, left_padded
from engine.three_prompts import GREEDY, PROMPTS, autocast, texts
from families import build_tiny
from internals import workspace_of

import hfpaged


def test_autocast_is_stocks(patched):
    model, _ = patched()
    stock = copy.deepcopy(model)
    options = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**left_padded(PROMPTS), **options).logits[0]
    with autocast():
        got = model.generate(**left_padded(PROMPTS), **options).logits[0]
        for row, prompt in enumerate(PROMPTS):
            want = stock.generate(**left_padded([prompt]), **options).logits[0][0]
            # bfloat16 has eight bits; the same prompt without autocast is several times as far away.
            assert (got[row] - want).abs().max() < 0.1
            assert got[row].argmax() == want.argmax()
    assert 0 < (got - plain).abs().max() < 0.2


def reachable_tensors(*roots):
    """Every tensor that can be reached from these objects by references, code and modules left out."""
    seen, todo, found = set(), list(roots), []
    skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, threading.Thread)
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, skipped):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        todo += gc.get_referents(one)
    return found


def train_step(model):
    ids = torch.tensor([PROMPTS[2]])
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("tier", ["auto", "leaves", "modules"])
def test_inference_mode_leaves_nothing_behind(patched, tier):
    model, engine = patched(tier=tier)
    with torch.inference_mode():
        for options in ({}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.5, "suppress_tokens": [4]}):
            model.generate(**left_padded(PROMPTS), **{**GREEDY, **options})
        handle = engine.submit(PROMPTS[0], **{**GREEDY, "max_new_tokens": 300})
        next(iter(handle))
        engine.check()
        assert not [tensor for tensor in reachable_tensors(model) if tensor.is_inference()]
        handle.cancel()
    assert len(reachable_tensors(model, workspace_of(engine))) > 40
    assert not [tensor for tensor in reachable_tensors(model, engine, vars(engine)) if tensor.is_inference()]


def test_generating_between_training_steps_changes_no_bit(patched):
    model, _ = patched()
    stock = build_tiny("llama")
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (stock, model)]
    for _ in range(3):
        want, got = train_step(stock), train_step(model)
        assert torch.equal(want[0], got[0])
        assert all(torch.equal(*both) for both in zip(want[1], got[1], strict=True))
        for optimizer in optimizers:
            optimizer.step()
        with torch.inference_mode():
            assert texts(model) == [alone(stock, prompt, **GREEDY) for prompt in PROMPTS]
    assert not model.training


def test_training_flag_and_grad_mode_are_left_alone(patched):
    model, _ = patched()
    model.train()
    with torch.enable_grad():
        texts(model)
        assert torch.is_grad_enabled()
    assert model.training
    assert hfpaged.engine(model).stats()["fallbacks"] == {}

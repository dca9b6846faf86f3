"""Training a patched model is training an unpatched one, bit for bit, whatever is generated in between."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from families import build_tiny
from oracle import assert_stock_text, greedy, stats
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpaged

BATCH = torch.tensor([[5, 9, 33, 71, 12, 8], [90, 2, 44, 17, 17, 3]])
# Config fields, and arguments of `train_and_generate`.
DROPOUT = {"attention_dropout": 0.3}
LOOPS = {
    "plain": ({}, {}),
    "dropout": (DROPOUT, {}),
    "checkpointing": ({}, {"checkpointing": True}),
    "checkpointing with dropout": (DROPOUT, {"checkpointing": True}),
    "bf16 autocast": ({}, {"autocast_train": True}),
    "bf16 autocast around all": ({}, {"autocast_train": True, "autocast_generate": True}),
}


def autocast(enabled):
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


def train_and_generate(
    model, patched, inference_mode, checkpointing=False, autocast_generate=False, autocast_train=False
):
    """Three steps with a generate call before each: losses, gradients and final weights."""
    if patched:
        model.patch()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    record = []
    torch.manual_seed(0)
    for _ in range(3):
        with torch.inference_mode() if inference_mode else torch.no_grad(), autocast(autocast_generate):
            greedy(model)
        assert model.training
        with autocast(autocast_train):
            loss = model(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
        record += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*record, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("inference_mode", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize(("fields", "arguments"), LOOPS.values(), ids=LOOPS)
def test_losses_gradients_and_weights_are_equal(fields, arguments, inference_mode):
    model = build_tiny("llama", num_hidden_layers=2, **fields)
    want = train_and_generate(copy.deepcopy(model), False, inference_mode, **arguments)
    got = train_and_generate(model, True, inference_mode, **arguments)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert stats(model)["fallbacks"] == ({"dropout in train mode": 3} if fields else {})
    assert_no_inference_tensor(model)
    model.eval()
    assert_stock_text(model)


def test_texts_during_training_are_stock():
    model = build_tiny("llama", num_hidden_layers=2).patch(release_after_call=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    texts = []
    for _ in range(3):
        texts.append(assert_stock_text(model))
        model(input_ids=BATCH, labels=BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len({str(text) for text in texts}) == 3
    assert model.training


def test_first_generate_in_inference_mode_leaves_nothing_behind(model):
    model.patch()
    with torch.inference_mode():
        greedy(model)
    assert_no_inference_tensor(model)
    model(input_ids=BATCH, labels=BATCH).loss.backward()


def assert_no_inference_tensor(model):
    """Of all objects that the model refers to, its engine included, none is an inference tensor."""
    seen, left = set(), [model]
    tensors = 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, str, int, float, bytes, torch.dtype)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            tensors += 1
            assert not one.is_inference()
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif type(one).__module__.startswith(("hfpaged", "transformers", "torch.nn")) or isinstance(one, nn.Module):
            left.append(getattr(one, "__dict__", {}))
            left += [getattr(one, slot, None) for slot in getattr(type(one), "__slots__", ()) if slot != "__dict__"]
    assert tensors > len(list(model.parameters()))


def test_forward_is_bit_equal_while_the_engine_runs(model):
    want = model(input_ids=BATCH).logits.detach()
    model.patch()
    engine = hfpaged.engine(model)
    handles = [engine.submit([3 + row, 5, 7], max_new_tokens=400, eos_token_id=-1) for row in range(4)]
    while not handles[-1].done:
        assert torch.equal(model(input_ids=BATCH).logits, want)


def test_gradients_while_the_engine_runs(model):
    def gradients():
        model.zero_grad()
        model(input_ids=BATCH, labels=BATCH).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    want = gradients()
    stop = threading.Event()
    model.patch()

    def generate_all_the_time():
        while not stop.is_set():
            greedy(model)

    thread = threading.Thread(target=generate_all_the_time)
    thread.start()
    try:
        for _ in range(5):
            assert all(torch.equal(one, other) for one, other in zip(gradients(), want, strict=True))
    finally:
        stop.set()
        thread.join()
    assert not stats(model)["fallbacks"]


def test_hooks_that_training_needs_do_not_count(model):
    """Adapters with gradient checkpointing need inputs that require gradients; it changes no number."""
    model.patch()
    model.enable_input_require_grads()
    assert_stock_text(model)
    model.disable_input_require_grads()
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).gradient_checkpointing_enable()
    assert_stock_text(model)


def test_the_random_generator_is_not_touched_by_greedy_calls(model):
    model.patch()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    greedy(model)
    assert torch.equal(torch.get_rng_state(), state)

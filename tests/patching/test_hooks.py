"""Hooks of the user's get stock's calls, with stock's shapes; those that Transformers installs itself do not count."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import left_padded
from oracle import GREEDY, NEW, PROMPTS, assert_stock_text, greedy, stats
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

BATCH = {**left_padded(PROMPTS), "max_new_tokens": NEW, **GREEDY}


class Steering:
    """Adds a vector to the last position of a layer, and notes the shapes it sees."""

    def __init__(self):
        self.shapes = []

    def __call__(self, module, args, output):
        self.shapes.append(tuple(output.shape))
        output[:, -1] += torch.linspace(-2, 2, output.shape[-1])


def test_steering(model):
    plain, hooked = Steering(), Steering()
    stock = copy.deepcopy(model)
    stock.model.layers[0].register_forward_hook(plain)
    want = stock.generate(**BATCH)
    unsteered = greedy(model.patch())
    handle = model.model.layers[0].register_forward_hook(hooked)
    assert torch.equal(model.generate(**BATCH), want)
    assert hooked.shapes == plain.shapes == [(3, 37, 64), *[(3, 1, 64)] * (NEW - 1)]
    assert stats(model)["fallbacks"] == {"user hooks": 1}
    handle.remove()
    assert assert_stock_text(model) == unsteered


def test_pre_hook(model):
    model.patch()
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: (-args[0],))
    assert torch.equal(model.generate(**BATCH), copy.deepcopy(model).generate(**BATCH))
    assert stats(model)["fallbacks"] == {"user hooks": 1}
    handle.remove()
    assert_stock_text(model)


def test_hook_with_keywords_on_attention(model):
    """Hooks that edit the KV cache find stock's cache among the keyword arguments."""
    seen = []
    model.patch()
    handle = model.model.layers[1].self_attn.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(sorted(kwargs)), with_kwargs=True
    )
    greedy(model)
    handle.remove()
    assert len(seen) == NEW and {"attention_mask", "hidden_states", "position_embeddings"} <= set(seen[0])
    assert stats(model)["fallbacks"] == {"user hooks": 1}


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_global_hooks_count(model, register):
    model.patch()
    handle = register(lambda *args: None)
    try:
        greedy(model)
    finally:
        handle.remove()
    assert stats(model)["fallbacks"] == {"user hooks": 1}
    assert_stock_text(model)


def test_hooks_on_the_model_itself(model):
    calls = []
    model.patch()
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    greedy(model)
    handle.remove()
    assert len(calls) == NEW
    assert stats(model)["fallbacks"] == {"user hooks": 1}


def test_hooks_of_transformers_do_not_count(model):
    model.patch()
    states = model(**left_padded(PROMPTS), output_hidden_states=True, output_attentions=True).hidden_states
    assert len(states) == 3
    assert any(module._forward_hooks for module in model.modules())
    assert_stock_text(model)


def test_backward_hooks_do_not_count(model):
    model.patch()
    handle = model.model.layers[0].register_full_backward_hook(lambda *args: None)
    assert_stock_text(model)
    handle.remove()


def test_parameter_hooks_do_not_count(model):
    model.patch()
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    assert_stock_text(model)

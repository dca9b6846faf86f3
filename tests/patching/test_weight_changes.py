"""However weights are changed, the next text is a fresh model's, with caches warm before the change and after it."""

from __future__ import annotations

import copy
import ctypes

import numpy as np
import pytest
import torch
from batches import alone
from excuse import assert_same_greedy_text
from families import build_tiny
from oracle import GREEDY, PROMPTS, assert_stock_text, greedy, stats, warm_up
from pause import paused_at_step
from torch import nn

import hfpaged

TIERS = ("auto", "leaves", "modules")
tiers = pytest.mark.parametrize("tier", TIERS)


def noise_like(tensor, seed=7):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def step_of(make_optimizer):
    def step(model):
        optimizer = make_optimizer(model.parameters())
        ids = torch.tensor([[5, 9, 33, 71, 12]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def add_to_data(model):
    for parameter in model.parameters():
        parameter.data += noise_like(parameter)


def copy_into_data(model):
    for parameter in model.parameters():
        parameter.data.copy_(noise_like(parameter))


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = noise_like(parameter)


def replace_parameters(model):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(module, name, nn.Parameter(noise_like(parameter)))


def load(assign):
    def change(model):
        state = {name: noise_like(tensor) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


def write_through_ctypes(model):
    for parameter in model.parameters():
        new = noise_like(parameter).contiguous()
        ctypes.memmove(parameter.data_ptr(), new.data_ptr(), new.nbytes)


def write_through_numpy(model):
    for parameter in model.parameters():
        parameter.detach().numpy()[...] = noise_like(parameter).numpy()


def change_one_number(model):
    """The smallest change there is, in the tensor's last byte."""
    memory = model.lm_head.weight.detach().numpy().view(np.uint8)
    memory[model.lm_head.weight.shape[0] // 2 :, -1] ^= 0x40


def exchange_two_layers(model):
    first, second = (layer.mlp.gate_proj.weight for layer in model.model.layers)
    saved = first.detach().clone()
    first.data.copy_(second.detach())
    second.data.copy_(saved)


def set_requires_grad_and_add(model):
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.add_(1.0)


CHANGES = {
    "AdamW foreach": step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "AdamW fused": step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)),
    "AdamW loop": step_of(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False)),
    "SGD": step_of(lambda parameters: torch.optim.SGD(parameters, lr=3.0)),
    "SGD fused": step_of(lambda parameters: torch.optim.SGD(parameters, lr=3.0, fused=True)),
    "data +=": add_to_data,
    "data.copy_": copy_into_data,
    "data =": replace_data,
    "new parameters": replace_parameters,
    "load_state_dict": load(assign=False),
    "load_state_dict assign": load(assign=True),
    "ctypes": write_through_ctypes,
    "numpy": write_through_numpy,
    "single bits": change_one_number,
    "exchange": exchange_two_layers,
    "add_ without grad": set_requires_grad_and_add,
}
# Versions, pointers and objects stay as they are.
UNSEEN = ("AdamW fused", "data +=", "ctypes")


@pytest.mark.parametrize(
    ("name", "tier"), [*((name, "auto") for name in CHANGES), *((n, tier) for n in UNSEEN for tier in TIERS[1:])]
)
def test_change(model, name, tier):
    before = warm_up(model.patch(tier=tier))
    cached, changes = stats(model)["cached_prompt_tokens"], stats(model)["weight_changes"]
    CHANGES[name](model)
    assert assert_stock_text(model) != before
    # What rows of one call share among themselves is new, too.
    assert stats(model)["cached_prompt_tokens"] - cached <= 16
    assert stats(model)["weight_changes"] == changes + 1
    warm_up(model)
    assert_stock_text(model)
    assert stats(model)["weight_changes"] == changes + 1


@tiers
def test_change_and_back(model, tier):
    """Evaluating with averaged weights, for example: both texts are right, at every turn."""
    before = warm_up(model.patch(tier=tier))
    saved = copy.deepcopy(model.state_dict())
    for _ in range(2):
        copy_into_data(model)
        assert assert_stock_text(model) != before
        for name, parameter in model.named_parameters():
            parameter.data.copy_(saved[name])
        assert assert_stock_text(model) == before


@tiers
def test_edited_frequencies(model, tier):
    before = warm_up(model.patch(tier=tier))
    model.model.rotary_emb.inv_freq.mul_(0.25)
    assert assert_stock_text(model) != before


@tiers
def test_replaced_buffer(model, tier):
    before = warm_up(model.patch(tier=tier))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25
    assert assert_stock_text(model) != before


@tiers
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "gpt2", "stablelm"])
def test_every_kind_of_weight(family, tier):
    """Norms, biases, sinks, experts and position tables are followed like matrices."""
    model = build_tiny(family, num_hidden_layers=2).patch(tier=tier)
    warm_up(model)
    for index, (_, parameter) in enumerate(model.named_parameters()):
        parameter.data += noise_like(parameter, seed=index)
    assert_stock_text(model)


@tiers
@pytest.mark.parametrize("name", ["sinks", "router", "bias", "norm", "embed"])
def test_one_kind_of_weight(name, tier):
    model = build_tiny("gpt_oss", num_hidden_layers=2).patch(tier=tier)
    before = warm_up(model)
    for parameter_name, parameter in model.named_parameters():
        if name in parameter_name:
            parameter.data += 4 * noise_like(parameter)
    assert assert_stock_text(model) != before


def test_model_made_in_inference_mode():
    with torch.inference_mode():
        model = build_tiny("llama", num_hidden_layers=2)
    assert model.lm_head.weight.is_inference()
    before = warm_up(model.patch())
    with torch.inference_mode():
        model.lm_head.weight.neg_()
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    assert assert_stock_text(model) != before


@tiers
def test_frozen_weights_change_when_told(model, tier):
    before = warm_up(model.patch(weights="frozen", tier=tier))
    copy_into_data(model)
    hfpaged.weights_changed(model)
    assert assert_stock_text(model) != before
    assert stats(model)["weight_changes"] == 1


def test_frozen_weights_are_not_read(model):
    warm_up(model.patch(weights="frozen"))
    copy_into_data(model)
    cached = stats(model)["cached_prompt_tokens"]
    greedy(model)
    assert stats(model)["cached_prompt_tokens"] >= cached + 32


def test_a_change_drops_prefixes_of_every_salt(model):
    model.patch()
    engine = hfpaged.engine(model)
    prompt = PROMPTS[0]
    for _ in range(2):
        engine.submit(prompt, max_new_tokens=2, hfpaged={"cache_salt": "a"}, **GREEDY).result(10)
    assert stats(model)["cached_prompt_tokens"] == 32
    copy_into_data(model)
    engine.submit(prompt, max_new_tokens=2, hfpaged={"cache_salt": "a"}, **GREEDY).result(10)
    assert stats(model)["cached_prompt_tokens"] == 32


@tiers
@pytest.mark.parametrize("change", [copy_into_data, load(assign=False)], ids=["unseen", "seen"])
def test_a_running_request_finishes_and_leaves_nothing_behind(model, change, tier):
    model.patch(tier=tier)
    assert_stock_text(model, prompts=PROMPTS[2:])
    with paused_at_step(model, 20) as paused:
        handle = hfpaged.engine(model).submit(PROMPTS[0], max_new_tokens=60, **GREEDY)
        assert paused.wait(60)
        change(model)
    assert len(handle.result(60)) == 60
    # Its prompt, and its text up to blocks that it computed before and after the change.
    text = [*PROMPTS[0], *handle.tokens]
    for prompt in (PROMPTS[0], text[:48], text[:90]):
        assert_alone_as_stock(model, prompt)


def test_a_request_that_joins_after_a_seen_change_shares_nothing_old(model):
    model.patch()
    assert_stock_text(model, prompts=PROMPTS[2:])
    engine = hfpaged.engine(model)
    with paused_at_step(model, 20) as paused:
        running = engine.submit(PROMPTS[0], max_new_tokens=60, **GREEDY)
        assert paused.wait(60)
        load(assign=False)(model)
        joined = engine.submit(PROMPTS[0], max_new_tokens=6, **GREEDY)
    fresh = copy.deepcopy(model)
    want = alone(fresh, PROMPTS[0], max_new_tokens=6, **GREEDY)
    assert_same_greedy_text(fresh, PROMPTS[0], joined.result(60), want)
    assert len(running.result(60)) == 60


def assert_alone_as_stock(model, prompt):
    fresh = copy.deepcopy(model)
    got, want = (alone(one, prompt, max_new_tokens=4, **GREEDY) for one in (model, fresh))
    assert_same_greedy_text(fresh, prompt, got, want)

"""The first sum of a layer in one kernel with the norm behind it, where numbers go through the layer that way."""

from __future__ import annotations

import gc

import pytest
import torch
from batches import left_padded, random_prompts
from families import build_tiny
from gpu.closeness import assert_close_text
from gpu.shapes import random_model

import hfpaged
from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.runtime.device.fused_forwards import FusedForwards
from hfpaged.runtime.runner import probe_layers
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.view import EngineView

PROMPTS = random_prompts((20, 5, 33))
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 10}
NOT_PLAIN = {
    "granite": "its GraniteRMSNorm does not read what the module before it returns",
    "olmo2": "no RMS norm reads the first sum",
    "cohere2": "its Cohere2MLP does not read what the module before it returns",
    "gpt2": "it is not called once, with one tensor and options, for one tensor",
}


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


def fused(model, dtype=torch.bfloat16):
    """Of a view whose attention modules are known."""
    view = EngineView(model, type(model))
    seen = probe_layers(view, ThreadState.capture("cpu"))
    view.step.bind(None, [None] * len(seen))
    return view, FusedForwards(view, dtype, FusionRegistry(FLASHINFER_FUSIONS))


def layers_of(refusals):
    return {reason: count for reason, count in refusals.items() if reason.startswith("layer")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", *NOT_PLAIN])
def test_layers_of_families_are_found(family):
    model = build_tiny(family).to(torch.bfloat16)
    if family == "granite":
        for layer in model.model.layers:
            layer.residual_multiplier = 0.5
    _, forwards = fused(model)
    count = model.config.num_hidden_layers
    refused = {f"layer: {NOT_PLAIN[family]}": count} if family in NOT_PLAIN else {}
    assert layers_of(forwards.refusals) == refused
    assert forwards.fused["layer"] == (0 if refused else count)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_a_fused_layer_gives_what_its_own_code_gives(family):
    view, forwards = fused(build_tiny(family).to(torch.bfloat16))
    assert forwards.fused["layer"] == 4
    layer = view.model.model.layers[1]
    attention = next(module for module in layer.children() if id(module) in view.step.layers)
    vars(attention)["forward"] = lambda hidden_states, **options: (hidden_states.sin() * 2, None)
    hidden = torch.randn(1, 6, view.model.config.hidden_size).bfloat16()
    options = dict.fromkeys(vars(layer)["forward"]._flow.options)
    with torch.no_grad():
        own = type(layer).forward(layer, hidden.clone(), **options)
        mine = layer(hidden.clone(), **options)
        # One option more or less is no call that was looked at.
        del options["position_ids"]
        other = layer(hidden.clone(), **options)
    assert (mine - own).abs().max() <= 2**-6 * own.abs().max()
    assert torch.equal(other, own)


def test_text_is_that_of_the_modules_and_sums_are_the_kernels(machine, monkeypatch):
    model = random_model("tiny", torch.device("cpu"), torch.bfloat16)
    want = [model.generate(**left_padded([p]), **GREEDY)[0, len(p) :].tolist() for p in PROMPTS]
    calls = []
    kernel = machine.library.norm.fused_add_rmsnorm
    monkeypatch.setattr(machine.library.norm, "fused_add_rmsnorm", lambda *args: calls.append(args) or kernel(*args))
    with hfpaged.patched(model, num_blocks=64):
        got = model.generate(**left_padded(PROMPTS), **GREEDY)[:, max(map(len, PROMPTS)) :].tolist()
        assert hfpaged.engine(model).stats()["captured_steps"] > 0
    for prompt, one, wanted in zip(PROMPTS, got, want, strict=True):
        assert_close_text(model, prompt, one, wanted)
    layers = model.config.num_hidden_layers
    # Each layer's check; then a step for the prompts, one as it is, and one that is captured.
    assert len(calls) == layers + 3 * layers


def test_weights_of_another_dtype_are_refused_before_and_behind_the_guard(machine, monkeypatch):
    model = build_tiny("gemma2").to(torch.bfloat16)
    model.model.layers[1].pre_feedforward_layernorm.float()
    _, forwards = fused(model)
    assert forwards.fused["layer"] == 3
    assert layers_of(forwards.refusals) == {"layer: weight is float32 but x is bfloat16": 1}
    view, forwards = fused(build_tiny("llama").to(torch.bfloat16))
    monkeypatch.setattr(machine.library.norm, "fused_add_rmsnorm", None)
    layer = view.model.model.layers[0]
    layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight.data.float()
    x, residual = torch.randn(2, 1, 3, 64).bfloat16()
    normed, total = vars(layer)["forward"].add_and_norm(x, residual)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, type(layer.post_attention_layernorm).forward(layer.post_attention_layernorm, total))


def test_a_model_that_reads_again_what_its_layers_read_keeps_its_own():
    model = build_tiny("llama").to(torch.bfloat16)
    layer, norm, kept = model.model.layers[2], model.model.norm, []

    class Keeping(type(layer)):
        def forward(self, hidden_states, **options):
            kept.append(hidden_states)
            return super().forward(hidden_states, **options)

    class Adding(type(norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states + kept.pop())

    layer.__class__, norm.__class__ = Keeping, Adding
    _, forwards = fused(model)
    assert layers_of(forwards.refusals) == {"layer: something else reads what a layer reads": 1}


def test_the_live_model_is_not_touched_and_the_view_is_left_as_it_was():
    model = build_tiny("llama").to(torch.bfloat16)
    view, forwards = fused(model)
    assert forwards.fused["layer"] == 4
    assert not any("forward" in vars(module) for module in model.modules())
    del forwards
    gc.collect()
    assert not any("forward" in vars(module) for module in view.model.modules())

"""The engine on the device: its texts, its captured steps, and that nothing waits."""

from __future__ import annotations

import pytest
import torch
from batches import left_padded, random_prompts
from families import build_tiny
from gpu.closeness import assert_close_text
from gpu.shapes import random_model
from internals import workspace_of

import hfpaged

GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "phi3")
# In 16 bits a rounding may send a token to another expert, after which its logits are not close to stock's any more.
WITH_EXPERTS = ("gpt_oss", "deepseek_v3", "mixtral")


def on(device, inputs):
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def texts(model, prompts, new, **options):
    inputs = on(model.device, left_padded(prompts))
    out = model.generate(**inputs, max_new_tokens=new, **{**GREEDY, **options})
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def compare_with_stock(model, prompts, new, backend="flashinfer", **options):
    """Returns the engine's statistics."""
    want = [texts(model, [prompt], new)[0] for prompt in prompts]
    with hfpaged.patched(model, num_blocks=512, attention_backend=backend, **options):
        got = texts(model, prompts, new)
        again = texts(model, prompts, new)
        counted = hfpaged.engine(model).stats()
    for prompt, cold, warm, wanted in zip(prompts, got, again, want, strict=True):
        assert_close_text(model, prompt, cold, wanted)
        assert_close_text(model, prompt, warm, wanted)
    assert counted["steps_ahead"] > 0
    return counted


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_families(device, family):
    model = build_tiny(family).to(device, torch.bfloat16)
    prompts = random_prompts((3, 16, 33, 47), common_prefix=16)
    compare_with_stock(model, prompts, 12)
    compare_with_stock(model, prompts, 12, max_batch_tokens=17)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_tiny_families_with_experts_begin_as_stock_does(device, family):
    model = build_tiny(family).to(device, torch.bfloat16)
    prompts = random_prompts((3, 16, 33, 47), common_prefix=16)
    want = [texts(model, [prompt], 1)[0] for prompt in prompts]
    with hfpaged.patched(model, num_blocks=512):
        got = texts(model, prompts, 12)
        counted = hfpaged.engine(model).stats()
    assert counted["backend"] == "flashinfer", counted["backend_reasons"]
    assert counted["captured_steps"] > 0 or counted["capture_problem"]
    assert sum(text[:1] == wanted for text, wanted in zip(got, want, strict=True)) >= len(prompts) - 1


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_preemption(device, kind):
    model = build_tiny("llama").to(device, torch.bfloat16)
    prompts = random_prompts((20, 33, 47, 64), common_prefix=16)
    want = [texts(model, [prompt], 24)[0] for prompt in prompts]
    with hfpaged.patched(model, num_blocks=9, preemption=kind):
        for prompt, got, wanted in zip(prompts, texts(model, prompts, 24), want, strict=True):
            assert_close_text(model, prompt, got, wanted)
        assert hfpaged.engine(model).stats()[f"preemptions_{kind}"] > 0


@pytest.mark.parametrize(("shape", "layers"), [("smollm2-135m", None), ("llama-3-8b", 8)])
def test_random_weights_in_real_shapes(gpu, shape, layers):
    model = random_model(shape, gpu, torch.bfloat16, layers)
    counted = compare_with_stock(model, random_prompts((5, 64, 200, 513)), 32)
    assert counted["captured_steps"] > 0, counted["capture_problem"]
    assert (counted["capture_breaks"], counted["tier_refusals"]) == ({}, {})


def test_layers_add_and_normalize_in_one_kernel(gpu):
    model = random_model("tiny", gpu, torch.bfloat16)
    with hfpaged.patched(model, num_blocks=512):
        texts(model, random_prompts((5,)), 1)
        fused = workspace_of(hfpaged.engine(model)).tier._fused
        assert fused.fused["layer"] == model.config.num_hidden_layers, fused.refusals


def test_all_sizes_are_captured_ahead(device):
    model = random_model("tiny", device, torch.bfloat16)
    with hfpaged.patched(model, num_blocks=512, max_requests=8):
        assert hfpaged.engine(model).warm_up() == 4
        assert hfpaged.engine(model).stats()["capture_problem"] is None


def test_steps_that_verify_guesses_are_captured(device):
    model = random_model("tiny", device, torch.bfloat16)
    prompt = (random_prompts((6,))[0] * 8)[:40]
    want = texts(model, [prompt], 24)[0]
    with hfpaged.patched(model, num_blocks=512):
        got = texts(model, [prompt], 24, prompt_lookup_num_tokens=3)[0]
        counted = hfpaged.engine(model).stats()
    assert_close_text(model, prompt, got, want)
    assert counted["captured_steps"] > 0, counted["capture_problem"]
    assert counted["draft_tokens"] > 0


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.2, "top_k": 50, "top_p": 0.9}])
def test_replays_against_uncaptured_steps(device, sampling):
    """The same draws from the same logits, up to the rounding of another split of the work."""
    model = random_model("tiny", device, torch.bfloat16)
    prompts = random_prompts((5, 16, 33))
    options = {**sampling, "hfpaged": {"seed": 3}} if sampling else {}
    with hfpaged.patched(model):
        captured = texts(model, prompts, 24, **options)
        assert hfpaged.engine(model).stats()["captured_steps"] > 0
    with hfpaged.patched(model):
        texts(model, prompts[:1], 1)
        workspace_of(hfpaged.engine(model)).tier.captured.forbid("not wanted")
        uncaptured = texts(model, prompts, 24, **options)
        assert hfpaged.engine(model).stats()["captured_steps"] == 0
    if sampling:
        # One draw that falls otherwise changes all that follows it in its row.
        assert any(one == other for one, other in zip(captured, uncaptured, strict=True))
    else:
        for prompt, got, wanted in zip(prompts, captured, uncaptured, strict=True):
            assert_close_text(model, prompt, got, wanted)


def test_no_step_waits_for_the_device(gpu):
    """PyTorch itself says so: every call that synchronizes raises, except where the tokens are read."""
    model = random_model("tiny", gpu, torch.bfloat16)
    prompts = random_prompts((5, 16, 33))
    for sampling in ({}, {"do_sample": True, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "hfpaged": {"seed": 1}}):
        with hfpaged.patched(model):
            want = texts(model, prompts, 16, **sampling)
            workspace = workspace_of(hfpaged.engine(model))
            run, launch = workspace.runner.run, workspace.launcher.launch
            workspace.runner.run = without_waiting(run)
            workspace.launcher.launch = without_waiting(launch)
            assert texts(model, prompts, 16, **sampling) == want


def without_waiting(function):
    def call(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call

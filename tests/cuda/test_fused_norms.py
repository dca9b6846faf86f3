"""Norm kernels in the place of norm modules: behind guards, and never with weights of another dtype."""

from __future__ import annotations

import gc

import pytest
import torch
from batches import left_padded, new_tokens, random_prompts
from families import build_tiny
from gpu.closeness import assert_close_text

import hfpaged
from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.runtime.device.fused_norms import FusedNorms
from hfpaged.runtime.view import EngineView

PROMPTS = random_prompts((20, 5, 33))
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 10}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


@pytest.mark.parametrize("fusion", FLASHINFER_FUSIONS, ids=lambda fusion: fusion.name)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_guards_admit_equal_16_bit_dtypes_only(fusion, x, weight, out):
    operands = {"x": Operand(x, (4, 64)), "weight": Operand(weight, (64,)), "out": Operand(out, (4, 64))}
    reason = fusion.guard(FusionValues(operands))
    assert (reason is None) == (x == weight == out != torch.float32)


def test_guards_refuse_another_device_and_strides():
    guard = FLASHINFER_FUSIONS[0].guard
    rows, weight = Operand(torch.bfloat16, (4, 64), device="cuda"), Operand(torch.bfloat16, (64,), device="cuda")
    assert guard(FusionValues({"x": rows, "weight": weight, "out": rows})) is None
    elsewhere = Operand(torch.bfloat16, (64,), device="cpu")
    assert "on cpu" in guard(FusionValues({"x": rows, "weight": elsewhere, "out": rows}))
    strided = Operand(torch.bfloat16, (64,), device="cuda", contiguous=False)
    assert "not contiguous" in guard(FusionValues({"x": rows, "weight": strided, "out": rows}))


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 9), ("qwen3", 17), ("gemma2", 17), ("gemma3_text", 25), ("olmo2", 17)]
)
def test_norms_of_families_are_found(family, count):
    model = build_tiny(family).to(torch.bfloat16)
    norms = FusedNorms(EngineView(model, type(model)), torch.bfloat16)
    assert norms.fused == count, norms.refusals
    assert not norms.refusals


def test_layer_norms_and_fp32_models_keep_their_own():
    model = build_tiny("llama")
    norms = FusedNorms(EngineView(model, type(model)), torch.float32)
    assert norms.fused == 0
    assert norms.refusals == {"norm: x is float32": 9}


def texts(model, **options):
    return new_tokens(model.generate(**left_padded(PROMPTS), **{**GREEDY, **options}), PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_texts(family):
    model = build_tiny(family).to(torch.bfloat16)
    want = [model.generate(**left_padded([p]), **GREEDY)[0, len(p) :].tolist() for p in PROMPTS]
    with hfpaged.patched(model):
        got = texts(model)
        assert hfpaged.engine(model).stats()["tier_refusals"] == {}
    for prompt, one, wanted in zip(PROMPTS, got, want, strict=True):
        assert_close_text(model, prompt, one, wanted)


def test_norm_weights_in_fp32_beside_16_bit_activations_are_harmless():
    """The kernels would read their bytes as numbers of 16 bits, and the text would be one token for ever."""
    model = build_tiny("llama").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.weight.data = module.weight.data.float() * 1.01
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    norms = FusedNorms(EngineView(model, type(model)), torch.bfloat16)
    assert norms.fused == 0
    assert sum(norms.refusals.values()) == 9


def test_a_kernel_that_fails_or_differs_is_not_used(machine, monkeypatch):
    model = build_tiny("llama").to(torch.bfloat16)

    def broken(*args):
        raise RuntimeError("ninja: build stopped\nand so on")

    monkeypatch.setattr(machine.library.norm, "rmsnorm", broken)
    norms = FusedNorms(EngineView(model, type(model)), torch.bfloat16)
    assert norms.refusals == {"norm: RuntimeError: ninja: build stopped": 9}
    monkeypatch.setattr(machine.library.norm, "rmsnorm", lambda x, weight, eps: x * 1.1)
    norms = FusedNorms(EngineView(model, type(model)), torch.bfloat16)
    assert norms.refusals == {"norm: the kernel's results are not the module's": 9}


def test_the_live_model_is_not_touched_and_the_view_is_left_as_it_was():
    model = build_tiny("llama").to(torch.bfloat16)
    view = EngineView(model, type(model))
    norms = FusedNorms(view, torch.bfloat16)
    assert norms.fused == 9
    assert not any("forward" in vars(module) for module in model.modules())
    del norms
    gc.collect()
    assert not any("forward" in vars(module) for module in view.model.modules())

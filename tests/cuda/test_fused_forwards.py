"""Kernels in the place of modules: behind guards, and never with weights of another dtype."""

from __future__ import annotations

import gc
from types import FunctionType, MethodType

import pytest
import torch
from batches import left_padded, new_tokens, random_prompts
from families import build_tiny
from gpu.closeness import assert_close_text
from gpu.shapes import random_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hfpaged
from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.runtime.device.fused_forwards import FusedForwards
from hfpaged.runtime.view import EngineView

PROMPTS = random_prompts((20, 5, 33))
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 10}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


@pytest.mark.parametrize("fusion", FLASHINFER_FUSIONS[:2], ids=lambda fusion: fusion.name)
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


def fused(model, dtype=torch.bfloat16):
    return FusedForwards(EngineView(model, type(model)), dtype, FusionRegistry(FLASHINFER_FUSIONS))


def of_kind(refusals, kind):
    return {reason: count for reason, count in refusals.items() if reason.startswith(kind)}


@pytest.mark.parametrize(
    ("family", "norms", "mlps"),
    [
        ("llama", 9, 4), ("qwen3", 17, 4), ("gemma2", 17, 4), ("gemma3_text", 25, 4), ("olmo2", 17, 4),
        ("phi3", 9, 4), ("mixtral", 9, 0), ("gpt2", 0, 0),
    ],
)  # fmt: skip
def test_modules_of_families_are_found(family, norms, mlps):
    forwards = fused(build_tiny(family).to(torch.bfloat16))
    assert (forwards.fused["norm"], forwards.fused["mlp"]) == (norms, mlps), forwards.refusals
    # Tiny heads have no kernel; nothing else is refused.
    assert set(forwards.refusals) <= {"rotation: query has 16 elements, for which there is no kernel"}


def rounding(self, x):
    return type(self).forward(self, (x * 64).round() / 64)


def test_an_mlp_whose_projections_round_their_input_is_left_alone():
    model = build_tiny("llama").to(torch.bfloat16)
    projection = model.model.layers[1].mlp.up_proj
    # The engine knows a forward of compressed-tensors by where it was written.
    written = FunctionType(rounding.__code__, {"__name__": "compressed_tensors.quantization"})
    projection.forward = MethodType(written, projection)
    assert fused(model).fused["mlp"] == 3


def test_layer_norms_and_fp32_models_keep_their_own():
    forwards = fused(build_tiny("llama"), torch.float32)
    assert not forwards.fused
    assert of_kind(forwards.refusals, "norm") == {"norm: x is float32": 9}
    assert of_kind(forwards.refusals, "mlp") == {"mlp: x is float32": 4}
    assert of_kind(fused(build_tiny("gpt_neox").to(torch.bfloat16)).refusals, "mlp") == {"mlp: it is not gated": 4}


def texts(model, **options):
    return new_tokens(model.generate(**left_padded(PROMPTS), **{**GREEDY, **options}), PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_texts(family):
    model = build_tiny(family).to(torch.bfloat16)
    want = [model.generate(**left_padded([p]), **GREEDY)[0, len(p) :].tolist() for p in PROMPTS]
    with hfpaged.patched(model):
        got = texts(model)
        assert not of_kind(hfpaged.engine(model).stats()["tier_refusals"], "norm")
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
    forwards = fused(model)
    assert forwards.fused["norm"] == 0
    assert of_kind(forwards.refusals, "norm") == {"norm: LlamaRMSNorm changes the dtype or shape of its input": 9}


def test_projections_in_fp32_beside_16_bit_activations_are_refused():
    model = build_tiny("llama").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            module.weight.data = module.weight.data.float()
    forwards = fused(model)
    assert forwards.fused["mlp"] == 0
    assert of_kind(forwards.refusals, "mlp") == {"mlp: weight_2 is float32 but x is bfloat16": 4}


@pytest.mark.parametrize(
    ("name", "kernel", "kind"), [("norm", "rmsnorm", "norm"), ("activation", "silu_and_mul", "mlp")]
)
def test_a_kernel_that_fails_or_differs_is_not_used(machine, monkeypatch, name, kernel, kind):
    model = build_tiny("llama").to(torch.bfloat16)
    library = getattr(machine.library, name)
    right = getattr(library, kernel)

    def broken(*args):
        raise RuntimeError("ninja: build stopped\nand so on")

    monkeypatch.setattr(library, kernel, broken)
    (reason,) = of_kind(fused(model).refusals, kind)
    assert reason == f"{kind}: RuntimeError: ninja: build stopped"
    monkeypatch.setattr(library, kernel, lambda *args: right(*args) * 1.1)
    (reason,) = of_kind(fused(model).refusals, kind)
    assert reason == f"{kind}: the kernel's results are not the module's"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_mlps_with_each_activation(machine, monkeypatch, activation, bias):
    model = build_tiny("llama", hidden_act=activation, mlp_bias=bias).to(torch.bfloat16)
    called = []
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        kernel = getattr(machine.library.activation, name)
        monkeypatch.setattr(
            machine.library.activation, name, lambda x, name=name, kernel=kernel: called.append(name) or kernel(x)
        )
    view = EngineView(model, type(model))
    forwards = FusedForwards(view, torch.bfloat16, FusionRegistry(FLASHINFER_FUSIONS))
    assert forwards.fused["mlp"] == 4
    expected = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}[activation]
    assert set(called) == {expected}
    x = torch.randn(1, 3, 64).to(torch.bfloat16)
    with torch.no_grad():
        got, want = (one.model.layers[0].mlp(x) for one in (view.model, model))
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 0.02 * want.abs().max()


def with_wide_heads():
    return random_model("tiny", torch.device("cpu"), torch.bfloat16)


def test_rotations_run_by_the_kernel_and_give_the_same_text(machine, monkeypatch):
    model = with_wide_heads()
    want = [model.generate(**left_padded([p]), **GREEDY)[0, len(p) :].tolist() for p in PROMPTS]
    calls = []
    kernel = machine.library.rope.apply_rope_with_cos_sin_cache
    monkeypatch.setattr(
        machine.library.rope,
        "apply_rope_with_cos_sin_cache",
        lambda *args, **options: calls.append(args) or kernel(*args, **options),
    )
    with hfpaged.patched(model, num_blocks=64):
        got = texts(model)
        # The stand-in is no machine that Triton's kernels run on.
        (refused,) = hfpaged.engine(model).stats()["tier_refusals"]
        assert refused == "draws: the Triton kernels run on GPUs of NVIDIA, AMD and Intel, not on cpu"
    for prompt, one, wanted in zip(PROMPTS, got, want, strict=True):
        assert_close_text(model, prompt, one, wanted)
    checks, layers = model.config.num_hidden_layers, model.config.num_hidden_layers
    # Each layer's check; then a step for the prompts, one as it is, and one that is captured: replays call nothing.
    assert len(calls) == checks + 3 * layers
    # The angles of a step are laid out once, for all its layers.
    assert calls[-1][4] is calls[-2][4] is not calls[-3][4]


def test_a_rotation_keeps_to_the_function_for_all_but_what_was_checked(machine, monkeypatch):
    model = with_wide_heads()
    view = EngineView(model, type(model))
    forwards = FusedForwards(view, torch.bfloat16, FusionRegistry(FLASHINFER_FUSIONS))
    assert forwards.fused["rotation"] == 2
    rotation = view.model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    monkeypatch.setattr(machine.library.rope, "apply_rope_with_cos_sin_cache", None)
    heads = torch.randn(1, 2, 3, 64)
    angles = torch.randn(1, 3, 64)
    for q, k, cos in (
        (heads, heads, angles),
        (heads.bfloat16(), heads, angles.bfloat16()),
        (heads.bfloat16(), heads.bfloat16(), angles),
        (heads[..., :32].bfloat16(), heads[..., :32].bfloat16(), angles[..., :32].bfloat16()),
    ):
        for mine, own in zip(rotation(q, k, cos, cos), apply_rotary_pos_emb(q, k, cos, cos), strict=True):
            assert mine.dtype is own.dtype
            assert torch.equal(mine, own)
    assert apply_rotary_pos_emb is not rotation


def test_the_live_model_is_not_touched_and_the_view_is_left_as_it_was():
    model = with_wide_heads()
    view = EngineView(model, type(model))
    forwards = FusedForwards(view, torch.bfloat16, FusionRegistry(FLASHINFER_FUSIONS))
    assert forwards.fused == {"norm": 5, "mlp": 2, "rotation": 2}
    assert not any("forward" in vars(module) for module in model.modules())
    del forwards
    gc.collect()
    assert not any("forward" in vars(module) for module in view.model.modules())

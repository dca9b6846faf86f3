"""Guards over every product of dtypes: what they admit computes exactly what the modules compute."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional

from hfpaged.fusion.catalogue import FUSIONS
from hfpaged.fusion.operand import FusionValues, Operand
from hfpaged.fusion.registry import FusionRefused, FusionRegistry

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
STORED = (torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16)
TRIPLES = list(itertools.product(DTYPES, repeat=3))
WIDTH = 24
GUARDS = {fusion.name: fusion.guard for fusion in FUSIONS}


def values(**dtypes: torch.dtype) -> FusionValues:
    return FusionValues({role: Operand((dtype), (4, WIDTH)) for role, dtype in dtypes.items()})


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


# What the modules of Transformers write, and what the kernels compute: fp32, rounded to T at the marked places.
MODULE_FORMULAS = {
    "rms_norm.rounded_then_scaled": lambda x, gamma: gamma * unit(x).to(x.dtype),
    "rms_norm.scaled_then_rounded": lambda x, gamma: (gamma * unit(x)).to(x.dtype),
}
KERNEL_FORMULAS = {
    "rms_norm.rounded_then_scaled": lambda x, gamma: (unit(x).to(x.dtype).float() * gamma.float()).to(x.dtype),
    "rms_norm.scaled_then_rounded": lambda x, gamma: (unit(x) * gamma.float()).to(x.dtype),
}


@pytest.mark.parametrize("name", MODULE_FORMULAS)
@pytest.mark.parametrize("x_dtype, gamma_dtype, out_dtype", TRIPLES)
def test_a_norm_is_admitted_only_where_the_kernel_gives_the_modules_bits(name, x_dtype, gamma_dtype, out_dtype):
    reason = GUARDS[name](values(x=x_dtype, gamma=gamma_dtype, out=out_dtype))
    x, gamma = random((4, WIDTH), x_dtype, 0), random((WIDTH,), gamma_dtype, 1)
    expected = MODULE_FORMULAS[name](x, gamma)
    computable = x_dtype in COMPUTED and out_dtype == expected.dtype == x_dtype
    if reason is None:
        assert computable
        assert torch.equal(KERNEL_FORMULAS[name](x, gamma), expected)
    else:
        same = computable and torch.equal(KERNEL_FORMULAS[name](x, gamma), expected)
        assert not same or gamma_dtype == torch.float64, f"refused without need: {reason}"


def test_bf16_activations_with_an_fp32_gamma_do_not_take_the_kernel_that_rounds_first():
    reason = GUARDS["rms_norm.rounded_then_scaled"](values(x=torch.bfloat16, gamma=torch.float32, out=torch.bfloat16))
    assert reason == "gamma is float32 but x is bfloat16"


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=4)))
def test_a_linear_is_admitted_only_in_one_computed_dtype(dtypes):
    x, weight, bias, out = dtypes
    admitted = GUARDS["linear"](values(x=x, weight=weight, bias=bias, out=out)) is None
    assert admitted == (len(set(dtypes)) == 1 and x in COMPUTED)
    try:
        result = functional.linear(*(torch.ones(1, 1, dtype=dtype) for dtype in (x, weight)), torch.ones(1, dtype=bias))
    except RuntimeError:
        assert not admitted
    else:
        assert not admitted or result.dtype == out


@pytest.mark.parametrize("dtypes", TRIPLES)
def test_a_residual_of_another_dtype_is_not_added_by_the_kernel(dtypes):
    x, residual, out = dtypes
    promoted = (torch.ones(1, dtype=residual) + torch.ones(1, dtype=x)).dtype
    admitted = GUARDS["linear_residual"](values(x=x, weight=x, residual=residual, out=out)) is None
    assert admitted == (x in COMPUTED and promoted == x == residual == out)


@pytest.mark.parametrize("dtypes", TRIPLES)
def test_attention_needs_queries_cache_and_output_of_one_dtype(dtypes):
    x, cache, out = dtypes
    admitted = GUARDS["paged_attention"](values(x=x, cache=cache, out=out)) is None
    assert admitted == (len(set(dtypes)) == 1 and x in COMPUTED)


@pytest.mark.parametrize("x, out, codes, scales", list(itertools.product(DTYPES, DTYPES, STORED, STORED)))
def test_packed_weights_are_admitted_only_as_words_and_bytes_beside_one_computed_dtype(x, out, codes, scales):
    admitted = GUARDS["packed_linear"](values(x=x, out=out, codes=codes, scales=scales)) is None
    assert admitted == (x == out and x in COMPUTED and codes == torch.int32 and scales == torch.uint8)


GOOD = values(
    x=torch.bfloat16,
    weight=torch.bfloat16,
    up_weight=torch.bfloat16,
    table=torch.bfloat16,
    cache=torch.bfloat16,
    residual=torch.bfloat16,
    gamma=torch.bfloat16,
    out=torch.bfloat16,
    codes=torch.int32,
    scales=torch.uint8,
    up_codes=torch.int32,
    up_scales=torch.uint8,
)


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
@pytest.mark.parametrize(
    "change, reason",
    [
        ({"autocast": torch.float16}, "autocast computes in float16"),
        ({"hooked": True}, "a replaced module has hooks or a replaced forward"),
        ({"adapted": True}, "a replaced module carries an adapter"),
    ],
)
def test_nothing_is_fused_across_autocast_hooks_or_adapters(fusion, change, reason):
    assert fusion.guard(GOOD) is None
    assert fusion.guard(dataclasses.replace(GOOD, **change)) == reason


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
@pytest.mark.parametrize(
    "change, reason",
    [
        ({"plain": False}, "a tensor subclass"),
        ({"device": "cuda"}, "on cuda"),
        ({"contiguous": False}, "not contiguous"),
    ],
)
def test_every_operand_must_be_a_plain_dense_tensor_on_the_cpu(fusion, change, reason):
    for role, operand in GOOD.operands.items():
        changed = {**GOOD.operands, role: dataclasses.replace(operand, **change)}
        assert fusion.guard(FusionValues(changed)) == f"{role} is {reason}"


def test_a_gamma_of_another_width_is_refused():
    operands = {**GOOD.operands, "gamma": Operand(torch.bfloat16, (WIDTH + 1,))}
    assert GUARDS["layer_norm"](FusionValues(operands)) == f"gamma has {WIDTH + 1} elements where x has {WIDTH}"


def test_refusals_are_counted_by_fusion_and_reason():
    registry = FusionRegistry()
    bad = values(x=torch.bfloat16, gamma=torch.float32, out=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(FusionRefused):
            registry.admit("rms_norm.rounded_then_scaled", bad)
    assert registry.admit("rms_norm.scaled_then_rounded", bad).fusion.name == "rms_norm.scaled_then_rounded"
    assert dict(registry.refusals) == {("rms_norm.rounded_then_scaled", "gamma is float32 but x is bfloat16"): 2}


def test_descriptions_of_tensors_see_subclasses_and_strides():
    class Quantized(torch.Tensor):
        pass

    assert Operand.of(torch.nn.Parameter(torch.zeros(2, 3))) == Operand(torch.float32, (2, 3))
    assert not Operand.of(torch.zeros(2, 3).as_subclass(Quantized)).plain
    assert not Operand.of(torch.zeros(3, 2).t()).contiguous
    assert Operand.of(torch.zeros(2, dtype=torch.bfloat16), torch.float32).dtype == torch.float32

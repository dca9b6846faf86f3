"""The packed matrix product against float64, for shapes that fit no tile, and its epilogues against torch."""

from __future__ import annotations

import pytest
import torch
from program.native_product import NativeProduct
from torch import nn
from torch.nn import functional

from hfpaged.program.abi import Activation, Epilogue

SHAPES = [(1, 1, 1), (2, 3, 65), (5, 64, 64), (6, 31, 130), (7, 577, 63), (13, 48, 200), (20, 96, 128), (21, 33, 100)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU_ERF: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
}


def random_linear(k: int, n: int, dtype: torch.dtype, bias: bool = False, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / k**0.5)
    return linear.to(dtype)


def random_rows(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_within_rounding_of_float64(isa, shape, dtype):
    m, k, n = shape
    linear, x = random_linear(k, n, dtype, bias=True), random_rows(m, k, dtype)
    exact = functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    got = NativeProduct(linear)(x).double()
    magnitude = functional.linear(x.double().abs(), linear.weight.double().abs(), linear.bias.double().abs())
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    # A chain of k fp32 additions, whose errors add up like a random walk.
    assert ((got - exact).abs() <= 1.01 * rounding + 2**-23 * k**0.5 * magnitude).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_thread_count(isa, dtype):
    product = NativeProduct(random_linear(90, 200, dtype, bias=True))
    x = random_rows(64, 90, dtype)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (2, 5, 6, 7, 12, 13, 20, 21, 40, 64):
        for threads in (1, 2, 3, 4):
            assert torch.equal(product(x[:rows], threads=threads), alone[:rows]), (rows, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS, ids=lambda a: a.name.lower())
def test_gated_epilogue_is_the_activation_of_the_gate_times_the_other_half(isa, activation, dtype):
    gate, up = (random_linear(40, 70, dtype, bias=True, seed=seed) for seed in (0, 1))
    x = random_rows(9, 40, dtype) * 4
    product = NativeProduct(gate, up, epilogue=Epilogue.GATED, activation=activation)
    _assert_close(product(x), FUNCTIONS[activation](gate(x)) * up(x))


@pytest.mark.parametrize("activation", FUNCTIONS, ids=lambda a: a.name.lower())
def test_store_epilogue_applies_the_activation(isa, activation):
    linear, x = random_linear(40, 70, torch.float32), random_rows(9, 40, torch.float32) * 6
    _assert_close(NativeProduct(linear, activation=activation)(x), FUNCTIONS[activation](linear(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_epilogue_adds_with_the_roundings_of_the_modules(isa, dtype):
    linear, x = random_linear(40, 70, dtype), random_rows(9, 40, dtype)
    residual, other = random_rows(9, 70, dtype, seed=2), random_rows(9, 70, dtype, seed=3)
    scaled = NativeProduct(linear, epilogue=Epilogue.RESIDUAL, multiplier=0.25)
    _assert_close(scaled(x, out=residual), residual + linear(x) * 0.25)
    parallel = NativeProduct(linear, epilogue=Epilogue.RESIDUAL, other=2)
    _assert_close(parallel(x, out=residual, other=other), linear(x) + other + residual)


def _assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to sums that another order of addition rounds the other way."""
    expected = expected.detach()
    if expected.dtype == torch.float32:
        # gelu takes 1 + erf(x) of negative x, which cancels: absolute, not relative, accuracy in both.
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-5)
    else:
        assert (got == expected).float().mean() > 0.97
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6)

"""The kernels for 4-bit weights against float64, for every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from quantization import checkpoints as make

from hfpaged.native import library
from hfpaged.quantization.codes import pack_nibbles, unpack_nibbles
from hfpaged.quantization.native_strips import can_multiply
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.record import QuantizedLinear, WeightFormat
from hfpaged.quantization.strips import codes_to_strips, scales_to_strips, strips_to_codes, strips_to_scales

MAKERS = {
    WeightFormat.NVFP4: (make.nvfp4_compressed, 16),
    WeightFormat.MXFP4: (make.mxfp4_compressed, 32),
    WeightFormat.INT4: (make.int4_compressed, 32),
}
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
# From 128 rows on, panels are unpacked.
ROWS = (1, 2, 3, 5, 6, 7, 13, 16, 17, 40, 127, 128, 149)


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    reason = library.unavailable()
    if reason:
        pytest.skip(reason)
    before, wanted = library.ISAS.index(library.isa()), library.ISAS.index(request.param)
    if library.load().hfp_use_isa(wanted) != wanted:
        library.load().hfp_use_isa(before)
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.load().hfp_use_isa(before)


def packed_linear(form: WeightFormat, n: int, k: int, bias: bool = False) -> tuple[PackedLinear, torch.Tensor]:
    """A random layer and its dequantized weight."""
    torch.manual_seed(n + k)
    pack, group = MAKERS[form]
    packed = pack("", torch.randn(n, k))
    tensors = packed.tensors
    divisor = tensors.get("weight_global_scale", torch.ones(1)).item()
    record = QuantizedLinear(
        form,
        tensors["weight_packed"].view(torch.uint8),
        tensors["weight_scale"],
        (1, group),
        1 / divisor,
        bias=torch.randn(n) if bias else None,
    )
    return PackedLinear(record), packed.weight


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (200, 96), (33, 128)], ids=str)
@pytest.mark.parametrize("form", MAKERS)
def test_products_are_within_rounding_of_float64(isa, form, shape, dtype):
    linear, weight = packed_linear(form, *shape, bias=True)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        assert can_multiply(x)
        exact = x.double() @ weight.double().T + linear.bias.double()
        assert (linear(x).double() - exact).norm() <= LIMITS[dtype] * exact.norm(), rows


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("form", [WeightFormat.NVFP4, WeightFormat.MXFP4])
def test_every_code_times_every_scale_is_exact(isa, form, dtype):
    group = MAKERS[form][1]
    # fp16 outputs hold no more of the exponents of E8M0.
    scales = torch.arange(127) if form is WeightFormat.NVFP4 else torch.arange(110, 140)
    scales = scales.to(torch.uint8)[:, None]
    codes = pack_nibbles((torch.arange(group) % 16).to(torch.uint8).expand(len(scales), -1))
    typed = scales.view(torch.float8_e4m3fn) if form is WeightFormat.NVFP4 else scales
    linear = PackedLinear(QuantizedLinear(form, codes, typed, (1, group)))
    weight = linear.record().dequantize().T.to(dtype)
    for copies in (1, 8):
        assert torch.equal(linear(torch.eye(group, dtype=dtype).repeat(copies, 1)), weight.repeat(copies, 1))
    for row in range(group):
        assert torch.equal(linear(torch.eye(group, dtype=dtype)[row : row + 1]), weight[row : row + 1])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("form", MAKERS)
def test_a_row_has_the_same_bits_in_every_batch_and_thread_count(isa, form, dtype):
    linear, _ = packed_linear(form, 200, 96)
    x = torch.randn(max(ROWS), 96).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows]), alone[:rows]), (rows, threads)


def test_strided_and_batched_inputs(isa):
    linear, weight = packed_linear(WeightFormat.NVFP4, 48, 64)
    wide = torch.randn(2, 3, 128)
    for x in (wide[..., :64], wide[..., 64:].transpose(0, 1), wide[:, :0, :64]):
        expected = x @ weight.T
        assert linear(x).shape == expected.shape
        assert torch.allclose(linear(x), expected, atol=1e-4)


def test_strips_are_a_permutation_of_codes_and_scales():
    codes = torch.randint(256, (40, 24), dtype=torch.uint8)
    strips = codes_to_strips(codes)
    assert strips.shape == (3, 6, 16)
    assert torch.equal(strips_to_codes(strips, 40), codes)
    # Word 1 of output 17 has the codes of inputs 8 to 15: even ones in its low half.
    word, wanted = int(strips[1, 1, 1]) & 0xFFFFFFFF, unpack_nibbles(codes)[17, 8:16].tolist()
    assert [word >> 4 * j & 15 for j in range(8)] == wanted[0::2] + wanted[1::2]
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float32):
        scales = torch.arange(120).reshape(40, 3).to(dtype)
        assert torch.equal(strips_to_scales(scales_to_strips(scales), dtype, 40).float(), scales.float())


def test_without_kernels_or_with_gradients_the_weight_is_dequantized(monkeypatch):
    linear, weight = packed_linear(WeightFormat.MXFP4, 48, 64)
    x = torch.randn(3, 64, requires_grad=True)
    linear(x).sum().backward()
    assert torch.allclose(x.grad, weight.sum(0).expand(3, -1), atol=1e-5)
    monkeypatch.setattr(library, "unavailable", lambda: "there are none")
    assert torch.allclose(linear(x.detach()), x.detach() @ weight.T, atol=1e-5)

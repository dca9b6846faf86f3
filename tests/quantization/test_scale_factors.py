"""Where scale factors lie for FlashInfer, which way round they are, and the layouts that hold them."""

from __future__ import annotations

import pytest
import torch
from quantization import formats
from quantization.checkpoints import tiny_like

import hfpaged
from hfpaged.quantization import memory_layout
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.record import QuantizedLinear
from hfpaged.quantization.scale_factors import encoding_scale, product_scale, swizzle, swizzled_shape, unswizzle

SHAPES = pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 36), (64, 8)], ids=str)


def byte_of(row: int, group: int, groups: int) -> int:
    """As the documentation of the layout gives it."""
    return (row // 128 * -(-groups // 4) + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@SHAPES
def test_each_scale_is_at_its_byte_and_the_rest_is_zero(shape):
    rows, groups = shape
    scales = torch.randint(1, 255, shape, dtype=torch.uint8)
    swizzled = swizzle(scales)
    assert tuple(swizzled.shape) == swizzled_shape(rows, groups) and swizzled.is_contiguous()
    flat = swizzled.flatten().tolist()
    places = {byte_of(row, group, groups): int(scales[row, group]) for row in range(rows) for group in range(groups)}
    assert flat == [places.get(byte, 0) for byte in range(len(flat))]


@SHAPES
def test_swizzling_can_be_undone_also_for_some_of_the_tiles(shape):
    scales = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(unswizzle(swizzle(scales), *shape), scales)
    if shape[0] > 128:
        assert torch.equal(unswizzle(swizzle(scales)[128:256], min(256, shape[0]) - 128, shape[1]), scales[128:256])


def test_conventions_are_reciprocal_to_each_other():
    decoding, weight = 0.125, 3.0
    assert encoding_scale(decoding, torch.device("cpu")).item() * decoding == 1.0
    assert product_scale(decoding, weight, torch.device("cpu")).item() == decoding * weight


@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
def test_weights_move_to_a_gpu_and_back_without_a_change(write, llama, tmp_path, monkeypatch):
    """A GPU is whatever wants rows."""
    folder = write(tmp_path / "checkpoint", tiny_like(llama)).folder
    monkeypatch.setattr(memory_layout, "wants_rows", lambda device: True)
    on_gpu = packed(hfpaged.from_pretrained(folder, dtype=torch.bfloat16))
    monkeypatch.setattr(memory_layout, "wants_rows", lambda device: False)
    on_cpu = packed(hfpaged.from_pretrained(folder, dtype=torch.bfloat16))
    assert set(on_cpu) == {name for name, module in on_gpu.items() if module.format.is_four_bit}
    for name, module in on_gpu.items():
        assert not module.is_in_strips and module.num_bytes < 0.6 * 2 * module.in_features * module.out_features
        whole = module.record().dequantize()
        assert torch.equal(torch.cat([part.dequantize() for part in in_chunks(module)]), whole)
        if name in on_cpu:
            assert torch.equal(whole, on_cpu[name].record().dequantize())
            assert torch.equal(torch.cat([part.dequantize() for part in in_chunks(on_cpu[name])]), whole)
        x = torch.randn(3, module.in_features, dtype=torch.bfloat16)
        before = module(x)
        assert torch.equal(module.to("cpu").bfloat16().record().dequantize(), whole)
        assert module.is_in_strips == module.format.is_four_bit
        assert (module(x).float() - before.float()).norm() <= 2e-2 * before.float().norm()


def packed(model: torch.nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if type(module) is PackedLinear}


def in_chunks(module: PackedLinear) -> list[QuantizedLinear]:
    last = module.out_features
    return [module.record(first, min(first + 128, last)) for first in range(0, last, 128)]


def test_a_wide_weight_is_dequantized_in_chunks(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_layout, "wants_rows", lambda device: True)
    monkeypatch.setattr("hfpaged.quantization.packed_linear._CHUNK_WEIGHTS", 1)
    saved = formats.ragged_fp8(tmp_path / "checkpoint", llama)
    model = hfpaged.from_pretrained(saved.folder, dtype=torch.float32)
    module = model.model.layers[0].mlp.gate_proj
    sizes = []
    record = PackedLinear.record
    monkeypatch.setattr(PackedLinear, "record", lambda self, *rows: sizes.append(rows) or record(self, *rows))
    x = torch.randn(2, module.in_features)
    expected = torch.nn.functional.linear(x, saved.dense.model.layers[0].mlp.gate_proj.weight)
    assert torch.allclose(module(x), expected, rtol=1e-5, atol=1e-5)
    assert sizes == [(0, 128), (128, 256), (256, 384), (384, 512), (512, 576)]

"""Making quantized weights: one dense weight to codes and scales, rounded to nearest."""

from __future__ import annotations

import torch

from hfpaged.quantization.codes import E2M1_MAX, E4M3_MAX, E8M0_BIAS, e8m0_values, pack_nibbles, to_e2m1
from hfpaged.quantization.record import QuantizedLinear, WeightFormat
from hfpaged.quantization.scheme import MXFP4_GROUP, NVFP4_GROUP

INT4_GROUP = 128
_SMALL_INT4_GROUP = 32
_LARGEST_INT4 = 7.0
_SMALLEST_E4M3 = 2.0**-9


def group_of(form: WeightFormat, in_features: int) -> int | None:
    """Inputs that share a scale in a layer of that many; None: it cannot be packed."""
    sizes = {
        WeightFormat.NVFP4: (NVFP4_GROUP,),
        WeightFormat.MXFP4: (MXFP4_GROUP,),
        WeightFormat.INT4: (INT4_GROUP, _SMALL_INT4_GROUP),
    }[form]
    return next((size for size in sizes if in_features % size == 0), None)


def quantize_weight(
    weight: torch.Tensor, form: WeightFormat, group: int, largest: float | None = None
) -> QuantizedLinear:
    """Quantize a dense weight [N, K], K a multiple of `group`.

    Args:
        largest: magnitude that NVFP4's global scale is made for; None: the weight's own. Layers that one kernel
            multiplies together should share it.
    """
    blocks = weight.float().unflatten(1, (-1, group))
    if form is WeightFormat.NVFP4:
        return _nvfp4(blocks, largest or blocks.abs().max().item())
    if form is WeightFormat.MXFP4:
        return _mxfp4(blocks)
    return _int4(blocks)


def _nvfp4(blocks: torch.Tensor, largest: float) -> QuantizedLinear:
    # A float32 divisor goes to disk, so the multiplier in use is its reciprocal.
    divisor = torch.tensor(E2M1_MAX * E4M3_MAX / max(largest, 1e-30))
    scale = 1.0 / divisor
    scales = (blocks.abs().amax(-1) / E2M1_MAX / scale).clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = to_e2m1(blocks / (scales.float() * scale)[..., None])
    return QuantizedLinear(
        WeightFormat.NVFP4, pack_nibbles(codes.flatten(1)), scales, (1, blocks.shape[2]), scale.item()
    )


def _mxfp4(blocks: torch.Tensor) -> QuantizedLinear:
    # The largest E2M1 number is 1.5 * 2**2.
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp_min(2.0**-120))) - 2
    scales = (exponent + E8M0_BIAS).to(torch.uint8)
    codes = to_e2m1(blocks / e8m0_values(scales)[..., None])
    return QuantizedLinear(WeightFormat.MXFP4, pack_nibbles(codes.flatten(1)), scales, (1, blocks.shape[2]))


def _int4(blocks: torch.Tensor) -> QuantizedLinear:
    scales = (blocks.abs().amax(-1) / _LARGEST_INT4).clamp_min(1e-30).bfloat16()
    codes = (blocks / scales.float()[..., None]).round().clamp(-8, 7) + 8
    packed = pack_nibbles(codes.to(torch.uint8).flatten(1))
    return QuantizedLinear(WeightFormat.INT4, packed, scales, (1, blocks.shape[2]))

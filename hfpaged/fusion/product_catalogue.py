"""The products with quantized weights on a GPU.

FlashInfer's take 4-bit codes and scales as bytes and read them as they should lie, whatever they are. PyTorch's have
checks of their own.
"""

from __future__ import annotations

import torch

from hfpaged.fusion.catalogue import Fusion
from hfpaged.fusion.guards import (
    Guard,
    all_of,
    capability_among,
    capability_from,
    dtype_among,
    multiple_of,
    needs,
    nothing_in_between,
    plain_together,
    same_dtype,
    tiled_scales,
)
from hfpaged.quantization.products import BF16_FP4, BF16_FP4_ON, FP4, FP4_FROM, FP8, FP8_FROM, SCALED_ROWS


def _product(*conditions: Guard) -> Guard:
    return all_of(
        nothing_in_between,
        needs("x", "codes", "scales", "out"),
        plain_together("x"),
        same_dtype("x", "out"),
        *conditions,
    )


def _four_bit(*conditions: Guard) -> Guard:
    return _product(
        dtype_among("codes", torch.uint8),
        dtype_among("scales", torch.uint8),
        tiled_scales(group=16),
        needs("alpha"),
        dtype_among("alpha", torch.float32),
        *conditions,
    )


def _eight_bit(*conditions: Guard) -> Guard:
    return _product(
        capability_from(FP8_FROM),
        dtype_among("x", torch.bfloat16),
        dtype_among("codes", torch.float8_e4m3fn),
        dtype_among("scales", torch.float32),
        multiple_of("x", 16),
        multiple_of("out", 16),
        *conditions,
    )


QUANTIZED_PRODUCTS = (
    Fusion(
        FP4,
        "linear(rounded to NVFP4(x)), the weight in NVFP4",
        "T(fp32 sum of products of codes and scales * alpha); codes of x by approximate reciprocals, so that a few "
        "may be neighbours",
        ("flashinfer",),
        _four_bit(
            capability_from(FP4_FROM),
            needs("input_scale"),
            dtype_among("input_scale", torch.float32),
            dtype_among("x", torch.bfloat16, torch.float16),
            multiple_of("x", 32),
            multiple_of("out", 32),
        ),
    ),
    Fusion(
        BF16_FP4,
        "linear(x), the weight in NVFP4",
        "T(fp32 sum * alpha)",
        ("flashinfer",),
        _four_bit(capability_among(*BF16_FP4_ON), dtype_among("x", torch.bfloat16), multiple_of("x", 16)),
    ),
    Fusion(
        FP8,
        "linear(rounded to FP8(x)), the weight in FP8, one scale for each",
        "T(fp32 sum of products of codes * alpha)",
        ("flashinfer",),
        _eight_bit(needs("alpha"), dtype_among("alpha", torch.float32)),
    ),
    Fusion(
        SCALED_ROWS,
        "linear(rounded to FP8(x)), the weight in FP8, one scale for each of its rows or for each row of x",
        "T(fp32 sum of products of codes * scale of the row of x * scale of the row of the weight)",
        ("torch",),
        _eight_bit(),
    ),
)

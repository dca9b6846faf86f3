"""Scale factors as the products of FlashInfer read them: how they lie in memory, and which way round they are.

All of hfpaged multiplies: weight = code * scale * global_scale, and a quantized input likewise. FlashInfer's quantizer
of inputs asks for the reciprocal, its products for what is left to multiply with. Both are made here and nowhere else.
"""

from __future__ import annotations

import torch

# One tile: scales of 128 rows and four groups, 512 bytes in a row.
TILE_ROWS = 128
TILE_GROUPS = 4
_LANES = 32


def swizzled_shape(rows: int, groups: int) -> tuple[int, int]:
    """Of the scales of [rows, groups], filled up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_GROUPS) * TILE_GROUPS


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [N, G] to the layout that FlashInfer calls 128x4, of `swizzled_shape`. What was filled up is 0.

    The scale of row n and group g lies at byte
    (n // 128 * ceil(G / 4) + g // 4) * 512 + n % 32 * 16 + n % 128 // 32 * 4 + g % 4.
    """
    rows, groups = swizzled_shape(*scales.shape)
    padded = scales.new_zeros(rows, groups)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.view(-1, TILE_ROWS // _LANES, _LANES, groups // TILE_GROUPS, TILE_GROUPS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def unswizzle(swizzled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Inverse of `swizzle`: uint8 [rows, groups]. Whole tiles of rows may be given by themselves."""
    padded_rows, padded_groups = swizzled.shape
    tiles = swizzled.view(-1, padded_groups // TILE_GROUPS, _LANES, TILE_ROWS // _LANES, TILE_GROUPS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_groups)[:rows, :groups]


def encoding_scale(input_scale: float, device: torch.device) -> torch.Tensor:
    """What `fp4_quantize` multiplies an input with, fp32 [1], for a scale that decoded values are multiplied with."""
    return torch.tensor([1.0 / input_scale], dtype=torch.float32, device=device)


def product_scale(input_scale: float, weight_scale: float, device: torch.device) -> torch.Tensor:
    """What a product of codes and scales is multiplied with (`alpha`), fp32 [1]."""
    return torch.tensor([input_scale * weight_scale], dtype=torch.float32, device=device)

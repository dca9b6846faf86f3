"""How a packed weight lies in memory: in strips for the CPU kernels, in rows for the products of a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from hfpaged.quantization.record import QuantizedLinear, WeightFormat
from hfpaged.quantization.scale_factors import TILE_ROWS, swizzle, unswizzle
from hfpaged.quantization.strips import STRIP, codes_to_strips, scales_to_strips, strips_to_codes, strips_to_scales

_SCALE_DTYPES = {
    WeightFormat.NVFP4: torch.float8_e4m3fn,
    WeightFormat.MXFP4: torch.uint8,
    WeightFormat.INT4: torch.float32,
    WeightFormat.FP8: torch.float32,
}
# Formats whose scales FlashInfer reads in tiles.
_TILED = (WeightFormat.NVFP4, WeightFormat.MXFP4)

Pair = tuple[torch.Tensor, torch.Tensor]


class WeightGrid(NamedTuple):
    """A weight [out_features, in_features] with one scale for each block."""

    format: WeightFormat
    block: tuple[int, int]
    out_features: int
    in_features: int


class Layout(ABC):
    """Codes and scales of a record as tensors of integers, so that casting a model leaves them alone."""

    @abstractmethod
    def store(self, record: QuantizedLinear) -> Pair:
        """(codes, scales) in this layout."""

    @abstractmethod
    def load(self, pair: Pair, grid: WeightGrid, first: int, last: int) -> Pair:
        """(codes, scales) of rows [first, last) as a `QuantizedLinear` has them; `first` a multiple of 128."""


class Strips(Layout):
    """For csrc/strips.h, four-bit formats only.

    codes: int32 [ceil(N / 16), K / 8, 16]; scales: bytes of one for each output and group,
    uint8 [ceil(N / 16), K / group, 16 * itemsize].
    """

    def store(self, record: QuantizedLinear) -> Pair:
        """See `Layout.store`."""
        return codes_to_strips(record.codes), scales_to_strips(_scales(record))

    def load(self, pair: Pair, grid: WeightGrid, first: int, last: int) -> Pair:
        """See `Layout.load`."""
        codes, scales = (part[first // STRIP : -(-last // STRIP)] for part in pair)
        dtype = _SCALE_DTYPES[grid.format]
        return strips_to_codes(codes, last - first), strips_to_scales(scales, dtype, last - first)


class Rows(Layout):
    """For products of rows with rows.

    codes: uint8 [N, K / 2], or [N, K] for FP8; scales: uint8, in the tiles of scale_factors.py for NVFP4 and MXFP4,
    bytes of fp32 [ceil(N / block), ceil(K / block)] for the others.
    """

    def store(self, record: QuantizedLinear) -> Pair:
        """See `Layout.store`."""
        scales = _scales(record).view(torch.uint8)
        if record.format in _TILED:
            scales = swizzle(scales)
        return record.codes.contiguous().view(torch.uint8), scales

    def load(self, pair: Pair, grid: WeightGrid, first: int, last: int) -> Pair:
        """See `Layout.load`."""
        codes, scales = pair
        if grid.format is WeightFormat.FP8:
            codes = codes.view(torch.float8_e4m3fn)
        rows, columns = grid.block
        if grid.format in _TILED:
            tiles = scales[first : -(-last // TILE_ROWS) * TILE_ROWS]
            scales = unswizzle(tiles, last - first, grid.in_features // columns)
        elif len(scales) > 1:
            scales = scales[first // rows : -(-last // rows)]
        return codes[first:last], scales.contiguous().view(_SCALE_DTYPES[grid.format])


def layout_for(device: torch.device, form: WeightFormat) -> Layout:
    """The layout that what computes on `device` reads."""
    return Strips() if form.is_four_bit and not wants_rows(device) else Rows()


def wants_rows(device: torch.device) -> bool:
    """Whether weights on `device` are multiplied by something else than the CPU kernels."""
    return device.type != "cpu"


def _scales(record: QuantizedLinear) -> torch.Tensor:
    """As they are stored: the codes of those that are codes, the values of the others in fp32."""
    dtype = _SCALE_DTYPES[record.format]
    return (record.scale_values() if dtype is torch.float32 else record.scales).to(dtype).contiguous()

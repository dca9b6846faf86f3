"""QuantizedLinear: one linear layer of a quantized checkpoint, the same whatever dialect it was stored in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from hfpaged.quantization.codes import e2m1_values, e8m0_values, int4_values, unpack_nibbles


class WeightFormat(str, Enum):
    """How a weight is stored."""

    NVFP4 = "nvfp4"  # E2M1 codes, one E4M3 scale for 16 along the input, one global scale
    MXFP4 = "mxfp4"  # E2M1 codes, one E8M0 scale for 32 along the input
    INT4 = "int4"  # codes 0 to 15, one scale for a group along the input
    FP8 = "fp8"  # E4M3 numbers, one scale for the tensor, a row or a block

    @property
    def is_four_bit(self) -> bool:
        """Whether `QuantizedLinear.codes` holds two weights a byte."""
        return self is not WeightFormat.FP8


@dataclass(frozen=True)
class ActivationScheme:
    """How a checkpoint quantizes the input of a linear layer.

    Attributes:
        format: "nvfp4" (E2M1 in groups of 16 with E4M3 scales found at run time), "mxfp4" (groups of 32) or
            "fp8" (E4M3).
        scale: multiplier of the whole tensor; None: found at run time, for each token.
    """

    format: str
    scale: float | None


@dataclass(frozen=True)
class QuantizedLinear:
    """The normalized record of one layer of N outputs and K inputs.

    weight[n, k] = (value(codes[n, k]) - zero[n, group]) * scale[n, group] * global_scale

    Attributes:
        codes: uint8 [N, K / 2], the even k in the low half; for FP8 float8_e4m3fn [N, K].
        scales: of the blocks: float8_e4m3fn (NVFP4), uint8 exponents (MXFP4), floating point (INT4, FP8);
            [ceil(N / block[0]), ceil(K / block[1])].
        block: (rows, columns) that one scale is for, from the checkpoint's config. The last ones may be smaller.
        global_scale: a multiplier, also where the checkpoint stores a divisor.
        zero: code that stands for zero, float [N, K / group]; None: the format's own.
        permutation: int64 [K], group of each input where they are not consecutive; None: they are.
        bias: [N], or None.
        activation: None: the input stays as it is.
    """

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    global_scale: float = 1.0
    zero: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: ActivationScheme | None = None

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes.shape[1] * (2 if self.format.is_four_bit else 1)

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32, [N, K], computed where the codes are."""
        values = self._values()
        if self.zero is not None:
            values = values - self._spread(self.zero.float())
        return values * self._spread(self.scale_values() * self.global_scale)

    def scale_values(self) -> torch.Tensor:
        """The scales of the blocks in fp32, without the global one."""
        return e8m0_values(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()

    def _values(self) -> torch.Tensor:
        if self.format is WeightFormat.FP8:
            return self.codes.float()
        codes = unpack_nibbles(self.codes)
        return int4_values(codes) if self.format is WeightFormat.INT4 else e2m1_values(codes)

    def _spread(self, per_block: torch.Tensor) -> torch.Tensor:
        """[blocks of N, blocks of K] to what broadcasts against [N, K]."""
        rows = _repeated(per_block, 0, self.block[0], self.out_features)
        if self.permutation is not None:
            return rows[:, self.permutation]
        return _repeated(rows, 1, self.block[1], self.in_features)


def _repeated(per_block: torch.Tensor, dim: int, block: int, size: int) -> torch.Tensor:
    if per_block.shape[dim] == 1 or block == 1:
        return per_block
    return per_block.repeat_interleave(block, dim).narrow(dim, 0, size)

"""The number formats of quantized weights: 4-bit codes, their packing, and the scales beside them. Plain torch.

Formats: OCP Microscaling specification v1.0 (E2M1, E8M0) and NVFP4 (E2M1 codes, one E4M3 scale for 16 of them).
"""

from __future__ import annotations

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255
E8M0_BIAS = 127

_INT4_OFFSET = 8
# The three low bits of an E2M1 code, shifted, are an fp16 number that is smaller by this factor.
_E2M1_TO_FP16 = 2.0**14


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] of 4-bit codes to uint8 [..., n / 2]: the even element in the low half of a byte."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., n / 2] to uint8 [..., n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 value of each uint8 E2M1 code. No table: one would have to be copied to the device at every call."""
    wide = codes.to(torch.int16)
    bits = ((wide & 7) << 9) | ((wide >> 3) << 15)
    return bits.view(torch.float16).float() * _E2M1_TO_FP16


def int4_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 value of each uint8 int4 code, which is stored with an offset."""
    return codes.float() - _INT4_OFFSET


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 E2M1 code nearest to each element; ties go to the even code, magnitudes above 6 to 6."""
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # Half way between neighbours. Where the lower code is even a tie stays there, else it goes up.
    for midpoint, ties_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (magnitude >= midpoint) if ties_up else (magnitude > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e8m0_values(bytes_: torch.Tensor) -> torch.Tensor:
    """fp32 2**(byte - 127) of uint8 E8M0 scales."""
    return torch.exp2(bytes_.float() - E8M0_BIAS)

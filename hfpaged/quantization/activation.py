"""Emulation of quantized activations: the numbers that a kernel with quantized inputs would multiply."""

from __future__ import annotations

import torch

from hfpaged.quantization.codes import E2M1_MAX, E4M3_MAX, e2m1_values, to_e2m1
from hfpaged.quantization.record import ActivationScheme
from hfpaged.quantization.scheme import MXFP4_GROUP, NVFP4_GROUP

_SMALLEST_E4M3 = 2.0**-9


def quantize_activation(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """x rounded to what `scheme` can represent, in the dtype of x. x: [..., K]; every row is independent."""
    wide = x.float()
    if scheme.format == "fp8":
        codes, step = fp8_codes(wide, scheme.scale)
        return (codes.float() * step).to(x.dtype)
    if scheme.format == "nvfp4":
        return _nvfp4(wide, scheme.scale).to(x.dtype)
    return _mxfp4(wide).to(x.dtype)


def fp8_codes(x: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(float8_e4m3fn of the shape of x, multiplier that gives x back).

    Args:
        scale: multiplier of the whole tensor; None: one for each row is found, fp32 [..., 1].
    """
    wide = x.float()
    step = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX if scale is None else scale
    return (wide / step).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), step


def _nvfp4(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if scale is None:
        scale = (largest.amax(-2, keepdim=True) / (E2M1_MAX * E4M3_MAX)).clamp_min(1e-30)
    block = (largest / E2M1_MAX / scale).clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return _to_grid(groups, block)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-125)
    # The largest E2M1 number is 1.5 * 2**2.
    return _to_grid(groups, torch.exp2(torch.floor(torch.log2(largest)) - 2))


def _to_grid(groups: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (e2m1_values(to_e2m1(groups / step)) * step).flatten(-2)

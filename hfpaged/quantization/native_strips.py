"""The kernels for packed 4-bit weights (csrc/strips.h), called from Python."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch

from hfpaged.native import library
from hfpaged.quantization.record import WeightFormat
from hfpaged.quantization.strips import WORD_CODES

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODE_KINDS = {WeightFormat.NVFP4: 0, WeightFormat.MXFP4: 0, WeightFormat.INT4: 1}
_SCALE_KINDS = {WeightFormat.NVFP4: 0, WeightFormat.MXFP4: 1, WeightFormat.INT4: 2}
_PANEL_STRIPS = 4


class Strip(ctypes.Structure):
    """Strip: 16 outputs of a weight."""

    _fields_ = [("codes", c_void_p), ("scales", c_void_p), ("multiplier", c_float)]


class StripWeight(ctypes.Structure):
    """StripWeight: all strips of a product."""

    _fields_ = [
        ("strips", c_void_p),
        *((name, c_int32) for name in ("codes", "scales", "group_words", "groups")),
    ]


class StripsArgs(ctypes.Structure):
    """HfpStripsArgs. Strides are in elements."""

    _fields_ = [
        ("weight", StripWeight),
        *((name, c_void_p) for name in ("bias", "input", "output")),
        *((name, c_int64) for name in ("input_stride", "output_stride", "rows")),
        *((name, c_int32) for name in ("columns", "dtype", "threads")),
    ]


def strips_of(codes: torch.Tensor, scales: torch.Tensor, multiplier: float) -> list[Strip]:
    """One struct for each strip of a weight. They point into the tensors, which must stay alive and in place."""
    code_bytes, scale_bytes = codes[0].nbytes, scales[0].nbytes
    return [
        Strip(codes.data_ptr() + index * code_bytes, scales.data_ptr() + index * scale_bytes, multiplier)
        for index in range(len(codes))
    ]


def strip_array(strips: list[Strip]) -> ctypes.Array:
    """The structs as the kernels want them: whole panels of four, the missing ones repeated."""
    missing = -len(strips) % _PANEL_STRIPS
    return (Strip * (len(strips) + missing))(*strips, *strips[:1] * missing)


def strip_weight(array: ctypes.Array, form: WeightFormat, group: int, in_features: int) -> StripWeight:
    """The weight that `array` holds, which must stay alive."""
    return StripWeight(
        ctypes.addressof(array), _CODE_KINDS[form], _SCALE_KINDS[form], group // WORD_CODES, in_features // group
    )


class StripProduct:
    """Multiplies with one packed weight. Holds addresses of `codes` and `scales`: make another one if they move."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, multiplier: float, form: WeightFormat, group: int):
        self._library = _declared()
        self._tensors = (codes, scales)
        self._array = strip_array(strips_of(codes, scales, multiplier))
        self._in_features = codes.shape[1] * WORD_CODES
        self._weight = strip_weight(self._array, form, group, self._in_features)

    def serves(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether these are the tensors that it was made for."""
        return codes is self._tensors[0] and scales is self._tensors[1]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
        """x [..., K] on the CPU to [..., N] of the same dtype. bias: fp32 [N], or None."""
        rows = x.reshape(-1, self._in_features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(len(rows), out_features, dtype=x.dtype)
        if not len(rows):
            return out.reshape(*x.shape[:-1], out_features)
        args = StripsArgs(self._weight, None if bias is None else bias.data_ptr(), rows.data_ptr(), out.data_ptr())
        args.input_stride, args.output_stride, args.rows = rows.stride(0), out.stride(0), len(rows)
        args.columns, args.dtype, args.threads = out_features, DTYPE_CODES[x.dtype], torch.get_num_threads()
        library.check(self._library.hfp_strips_linear(ctypes.byref(args)))
        return out.reshape(*x.shape[:-1], out_features)


def can_multiply(x: torch.Tensor) -> bool:
    """Whether the kernels take this input: on the CPU, in a dtype they have, without a graph of gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPE_CODES
        and not (torch.is_grad_enabled() and x.requires_grad)
        and library.unavailable() is None
    )


def _declared() -> ctypes.CDLL:
    loaded = library.load()
    loaded.hfp_strips_linear.restype = c_int
    loaded.hfp_strips_linear.argtypes = (ctypes.POINTER(StripsArgs),)
    return loaded

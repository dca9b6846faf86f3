"""FlashInfer's quantizer of inputs and its products of packed numbers, see fake_flashinfer.

They read bytes where the library does, by its own formula for the places of scales, and refuse what it would take for
something else. They multiply what the codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from standin.contract import require
from standin.fake_accelerator import FakeAccelerator


class _Unset:
    """The library's mark of an argument that was left out; it then asks an environment variable."""

    def __repr__(self) -> str:
        return "<nvfp4_4over6 unset: read FLASHINFER_NVFP4_4OVER6*>"


_UNSET = _Unset()
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FROM_SM90 = {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}
_FROM_SM100 = _FROM_SM90 - {(9, 0)}


def fp4_quantize(
    input, global_scale=None, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=True, is_sf_8x4_layout=False,
    is_global_scale_inversed=False, enable_pdl=None, backend="cuda", nvfp4_4over6=_UNSET,
):  # fmt: skip
    require(nvfp4_4over6 is None, "an environment variable would choose the recipe")
    require((sf_vec_size, sf_use_ue8m0, backend) == (16, False, "cuda"), "this stand-in knows NVFP4 only")
    require(is_sf_swizzled_layout and not is_sf_8x4_layout and not is_global_scale_inversed, "a layout for no product")
    require(input.dtype in (torch.bfloat16, torch.float16), f"inputs are not {input.dtype}")
    require(input.dim() == 2 and input.is_contiguous() and input.shape[1] % 16 == 0, "inputs are contiguous groups")
    require(len(input) == 1 or input.stride(-2) != 1, "rows of one element are taken for columns")
    _require_scalar(global_scale, "global_scale")
    groups = input.float().unflatten(1, (-1, 16))
    scales = (global_scale * (groups.abs().amax(-1) / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    step = scales.float() / global_scale
    unit = torch.where(step[..., None] > 0, groups / step[..., None].clamp_min(1e-30), torch.zeros_like(groups))
    codes = _nearest(unit.abs().clamp(max=6)) | (torch.signbit(unit).to(torch.uint8) << 3)
    codes = codes.flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), _tiled(scales.view(torch.uint8))


def mm_fp4(
    a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16, use_8x4_sf_layout=False,
    backend="auto", use_nvfp4=True, enable_pdl=True,
):  # fmt: skip
    require(backend == "cutlass", "the choice of a backend would depend on versions, and some want shuffled weights")
    require((block_size, use_8x4_sf_layout, use_nvfp4) == (16, False, True), "this stand-in knows NVFP4 only")
    require(a.dtype is b.dtype is torch.uint8, "codes are bytes")
    require(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], "codes are [m, k / 2] and [k / 2, n]")
    require(a.is_contiguous() and b.t().is_contiguous(), "codes are rows, those of b seen as columns")
    require(2 * a.shape[1] % 32 == 0 and b.shape[1] % 32 == 0, "k and n are multiples of 32")
    require(out_dtype in (torch.bfloat16, torch.float16), f"products are not {out_dtype}")
    _require_scalar(alpha, "alpha")
    product = _values(a, a_descale) @ _values(b.t(), b_descale.t()).t()
    return (product * alpha).to(out_dtype)


def mm_bf16_fp4(
    a, b, b_descale, alpha=None, *, backend, out_dtype=None, out=None, block_size=16, enable_pdl=True
):  # fmt: skip
    require(backend == "cute-dsl-native" and block_size == 16, "other backends want weights laid out for them")
    require(a.dtype is torch.bfloat16 and a.dim() == 2 and a.is_contiguous(), "inputs are rows of bfloat16")
    require(b.dtype is torch.uint8 and b.is_contiguous() and 2 * b.shape[1] == a.shape[1], "codes are rows of bytes")
    require(b.data_ptr() % 4 == 0 and a.shape[1] % 16 == 0, "codes are aligned")
    _require_scalar(alpha, "alpha")
    return (a.float() @ _values(b, b_descale).t() * alpha).to(out_dtype or a.dtype)


def mm_fp8(a, b, alpha=None, out_dtype=torch.bfloat16, out=None, backend="trtllm_low_latency"):
    require(backend == "cublas", "other backends want weights laid out for them, or newer devices")
    require(a.dtype is b.dtype is torch.float8_e4m3fn, "codes are e4m3")
    require(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1], "codes are [m, k] and [n, k]")
    require(a.is_contiguous() and b.is_contiguous(), "codes are rows")
    require(a.shape[1] % 16 == 0 and len(b) % 16 == 0, "k and n are multiples of 16")
    require(out_dtype is torch.bfloat16, f"products are not {out_dtype}")
    _require_scalar(alpha, "alpha")
    return (a.float() @ b.float().t() * alpha).to(out_dtype)


# Each with the compute capabilities that it was compiled for.
PRODUCTS = {
    fp4_quantize: _FROM_SM90,
    mm_fp4: _FROM_SM100,
    mm_bf16_fp4: {(12, 0), (12, 1)},
    mm_fp8: _FROM_SM90 | {(8, 9)},
}


def on_device(function: Callable, device: FakeAccelerator) -> Callable:
    """The function as a device of some compute capability has it."""

    @wraps(function)
    def checked(*args, **kwargs):
        require(device.capability in PRODUCTS[function], f"{function.__name__} is not for {device.capability}")
        return function(*args, **kwargs)

    return checked


def _require_scalar(tensor: torch.Tensor | None, name: str) -> None:
    require(tensor is not None and tensor.dtype is torch.float32, f"{name} is not float32, as which it is read")
    require(tensor.numel() == 1, f"{name} is not one number")


def _nearest(magnitudes: torch.Tensor) -> torch.Tensor:
    """Code of the nearest value; of two equally near ones the even code."""
    distance = (magnitudes[..., None] - _E2M1).abs()
    odd = torch.arange(8) % 2
    return (distance + 1e-6 * odd).argmin(-1).to(torch.uint8)


def _place(rows: torch.Tensor, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Byte of the scale of each row and group, as the library's documentation gives it."""
    tile = rows // 128 * -(-num_groups // 4) + groups // 4
    return tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + groups % 4


def _tiled(scales: torch.Tensor) -> torch.Tensor:
    rows, groups = scales.shape
    padded = -(-rows // 128) * 128, -(-groups // 4) * 4
    flat = scales.new_zeros(padded[0] * padded[1])
    places = _place(torch.arange(rows)[:, None], torch.arange(groups)[None], groups)
    return flat.index_copy(0, places.flatten(), scales.flatten()).view(padded)


def _values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes [n, k / 2] and their scales in tiles stand for, fp32 [n, k]."""
    rows, groups = len(codes), codes.shape[1] // 8
    require(scales.dtype in (torch.uint8, torch.float8_e4m3fn), f"scales are {scales.dtype}, not bytes")
    wanted = -(-rows // 128) * 128, -(-groups // 4) * 4
    require(tuple(scales.shape) == wanted and scales.is_contiguous(), f"scales are not in tiles of {wanted}")
    places = _place(torch.arange(rows)[:, None], torch.arange(groups)[None], groups)
    steps = scales.view(torch.uint8).flatten().index_select(0, places.flatten()).view(rows, groups)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    values = _E2M1.index_select(0, (nibbles & 7).long().flatten()).view(rows, -1)
    signed = torch.where(nibbles > 7, -values, values)
    return (signed.unflatten(1, (-1, 16)) * steps.contiguous().view(torch.float8_e4m3fn).float()[..., None]).flatten(1)

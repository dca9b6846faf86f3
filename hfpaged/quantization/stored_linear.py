"""StoredLinear: holds the tensors of one quantized linear layer while a checkpoint loads, under their own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import StoredTensor
from hfpaged.quantization.codes import E2M1_MAX, E8M0_NAN, unpack_nibbles
from hfpaged.quantization.record import ActivationScheme, QuantizedLinear, WeightFormat
from hfpaged.quantization.scheme import Scheme

# Of the largest weight of a trained layer: beyond it a scale was stored as its own reciprocal.
_PLAUSIBLE_LARGEST = (1e-4, 1e2)
_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BF16": torch.bfloat16,
    "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class StoredLinear(nn.Module):
    """Empty tensors for the loader to fill, then the record made of them.

    Args:
        tensors: dtype and shape of each, as on disk, by the last part of its name.
        dtype: of the bias in the model.
    """

    def __init__(self, scheme: Scheme, tensors: Mapping[str, StoredTensor], dtype: torch.dtype):
        super().__init__()
        self.scheme = scheme
        for leaf, stored in tensors.items():
            kind = dtype if leaf == "bias" else _DTYPES[stored.dtype]
            parameter = nn.Parameter(torch.empty(stored.shape, dtype=kind, device="meta"), requires_grad=False)
            self.register_parameter(leaf, parameter)

    def record(self, name: str) -> QuantizedLinear:
        """The normalized record of what was loaded.

        Raises:
            CheckpointError: naming a tensor that is not finite, not positive where it has to be, or implausible.
        """
        loaded = {leaf: value.detach() for leaf, value in self.named_parameters(recurse=False)}
        for leaf, value in loaded.items():
            _require_sound(f"{name}.{leaf}", value)
        return _READERS[self.scheme.format](self.scheme, name, loaded)


def _require_sound(name: str, value: torch.Tensor) -> None:
    if value.dtype == torch.uint8 and name.endswith("weight_scale"):
        finite = not bool((value == E8M0_NAN).any())  # E8M0 has one NaN and nothing else
    else:
        finite = not value.is_floating_point() or bool(torch.isfinite(value.float()).all())
    if not finite:
        raise CheckpointError(f"{name} is not finite")
    if name.endswith("_scale") and value.dtype == torch.float8_e4m3fn and bool(torch.signbit(value.float()).any()):
        raise CheckpointError(f"{name} is negative")


def _positive(name: str, value: torch.Tensor) -> float:
    number = float(value)
    if not 0.0 < number < float("inf"):
        raise CheckpointError(f"{name} is {number}, expected a positive number")
    return number


def _activation(scheme: Scheme, scale: float | None) -> ActivationScheme | None:
    return None if scheme.activation is None else ActivationScheme(scheme.activation, scale)


def _read_nvfp4(scheme: Scheme, name: str, loaded: dict[str, torch.Tensor]) -> QuantizedLinear:
    """The one place where the reciprocal conventions meet: everything after it multiplies."""
    if scheme.dialect == "modelopt":
        codes, scale_name, input_name = loaded["weight"], "weight_scale_2", "input_scale"
        scale = _positive(f"{name}.{scale_name}", loaded[scale_name])
    else:
        codes, scale_name, input_name = loaded["weight_packed"], "weight_global_scale", "input_global_scale"
        scale = 1.0 / _positive(f"{name}.{scale_name}", loaded[scale_name])
    largest = E2M1_MAX * loaded["weight_scale"].float().abs().amax().item() * scale
    if largest and not _PLAUSIBLE_LARGEST[0] <= largest <= _PLAUSIBLE_LARGEST[1]:
        raise CheckpointError(
            f"{name}.{scale_name} gives weights of up to {largest:.1e}: it seems to be stored as its reciprocal"
        )
    input_scale = None
    if scheme.activation is not None and input_name in loaded:
        input_scale = _positive(f"{name}.{input_name}", loaded[input_name])
        input_scale = input_scale if scheme.dialect == "modelopt" else 1.0 / input_scale
    activation = _activation(scheme, input_scale)
    return QuantizedLinear(
        scheme.format,
        codes,
        loaded["weight_scale"],
        scheme.block,
        scale,
        bias=loaded.get("bias"),
        activation=activation,
    )


def _read_mxfp4(scheme: Scheme, name: str, loaded: dict[str, torch.Tensor]) -> QuantizedLinear:
    return QuantizedLinear(
        scheme.format,
        loaded["weight_packed"],
        loaded["weight_scale"],
        scheme.block,
        bias=loaded.get("bias"),
        activation=_activation(scheme, None),
    )


def _read_int4(scheme: Scheme, name: str, loaded: dict[str, torch.Tensor]) -> QuantizedLinear:
    codes, scales = loaded["weight_packed"].contiguous().view(torch.uint8), loaded["weight_scale"]
    shape = (codes.shape[0], codes.shape[1] * 2)
    if tuple(loaded["weight_shape"].tolist()) != shape:
        raise CheckpointError(f"{name}.weight_shape is {loaded['weight_shape'].tolist()}, the codes are {list(shape)}")
    zero = loaded.get("weight_zero_point")
    if zero is not None:
        # Packed along the rows; an offset of 8 is in codes and zero points alike and cancels.
        unpacked = unpack_nibbles(zero.t().contiguous().view(torch.uint8)).t()
        zero = unpacked[: scales.shape[0]].float() - 8.0
    permutation = loaded.get("weight_g_idx")
    return QuantizedLinear(
        scheme.format,
        codes,
        scales,
        (1, scheme.block[1] or shape[1]),
        zero=zero,
        permutation=None if permutation is None else permutation.long(),
        bias=loaded.get("bias"),
        activation=_activation(scheme, None),
    )


def _read_fp8(scheme: Scheme, name: str, loaded: dict[str, torch.Tensor]) -> QuantizedLinear:
    codes = loaded["weight"]
    block = tuple(size or whole for size, whole in zip(scheme.block, codes.shape, strict=True))
    scale_name = "weight_scale_inv" if scheme.dialect == "fp8" else "weight_scale"
    scales = loaded[scale_name]
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.float()
    scales = scales.reshape(-(-codes.shape[0] // block[0]), -(-codes.shape[1] // block[1]))
    input_scale = None
    if scheme.static_activation and "input_scale" in loaded:
        input_scale = _positive(f"{name}.input_scale", loaded["input_scale"])
    return QuantizedLinear(
        scheme.format,
        codes,
        scales,
        block,
        bias=loaded.get("bias"),
        activation=_activation(scheme, input_scale),
    )


_READERS = {
    WeightFormat.NVFP4: _read_nvfp4,
    WeightFormat.MXFP4: _read_mxfp4,
    WeightFormat.INT4: _read_int4,
    WeightFormat.FP8: _read_fp8,
}

"""The tensors that a quantized linear layer consists of on disk, by dialect and format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hfpaged.errors import CheckpointError
from hfpaged.quantization.checkpoint import Checkpoint, StoredTensor
from hfpaged.quantization.record import WeightFormat
from hfpaged.quantization.scheme import Scheme

# Names that only quantization tools give to tensors.
_QUANTIZATION_NAME = re.compile(
    r"(scale|scales|zero_point|zeros|qzeros|absmax|g_idx|qweight|weight_packed|weight_shape|scale_inv|scale_2|_amax)$"
)
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")


def is_quantization_name(leaf: str) -> bool:
    """Whether the last part of a tensor's name is one that quantization tools give."""
    return _QUANTIZATION_NAME.search(leaf) is not None


@dataclass(frozen=True)
class Expected:
    """One tensor of a layout.

    Attributes:
        dtypes, shapes: any one of them; dtypes as safetensors names them.
        required: whether the layout is incomplete without it.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True


class _Linear(NamedTuple):
    """A linear layer as a scheme cuts it.

    Attributes:
        grid: how many blocks that share a scale it has, over outputs and inputs.
        needs_input_scale: whether its inputs are rounded by a scale that the checkpoint must have.
    """

    out_features: int
    in_features: int
    grid: tuple[int, int]
    needs_input_scale: bool


_SCALAR = ((), (1,))


def expected_tensors(scheme: Scheme, out_features: int, in_features: int) -> dict[str, Expected]:
    """The tensors that a linear layer of a scheme consists of, by the last part of their names.

    Raises:
        CheckpointError: the layer cannot be cut into groups of the scheme's size.
    """
    rows, columns = (size or whole for size, whole in zip(scheme.block, (out_features, in_features), strict=True))
    if scheme.format.is_four_bit and in_features % columns:
        raise CheckpointError(f"{in_features} inputs cannot be cut into groups of {columns}")
    layout = _LAYOUTS.get((scheme.dialect, scheme.format))
    if layout is None:
        raise CheckpointError(f"{scheme.dialect} has no {scheme.format.value} layout that is known")
    grid = (-(-out_features // rows), -(-in_features // columns))
    tensors = layout(_Linear(out_features, in_features, grid, scheme.static_activation))
    return tensors | {"bias": Expected(("F32", "BF16", "F16"), ((out_features,),), False)}


def _modelopt_nvfp4(linear: _Linear) -> dict[str, Expected]:
    return {
        "weight": _nibbles(linear),
        "weight_scale": Expected(("F8_E4M3",), (linear.grid,)),
        "weight_scale_2": Expected(("F32",), _SCALAR),
        "input_scale": Expected(("F32",), _SCALAR, linear.needs_input_scale),
    }


def _modelopt_fp8(linear: _Linear) -> dict[str, Expected]:
    scales = _SCALAR if linear.grid == (1, 1) else (linear.grid, linear.grid[:1])
    return {
        "weight": _float8(linear),
        "weight_scale": Expected(("F32",), scales),
        "input_scale": Expected(("F32",), _SCALAR, linear.needs_input_scale),
    }


def _compressed_nvfp4(linear: _Linear) -> dict[str, Expected]:
    return {
        "weight_packed": _nibbles(linear),
        "weight_scale": Expected(("F8_E4M3",), (linear.grid,)),
        "weight_global_scale": Expected(("F32",), _SCALAR),
        "input_global_scale": Expected(("F32",), _SCALAR, linear.needs_input_scale),
    }


def _compressed_mxfp4(linear: _Linear) -> dict[str, Expected]:
    return {"weight_packed": _nibbles(linear), "weight_scale": Expected(("U8",), (linear.grid,))}


def _compressed_int4(linear: _Linear) -> dict[str, Expected]:
    rows, columns = linear.grid
    return {
        "weight_packed": Expected(("I32",), ((linear.out_features, linear.in_features // 8),)),
        "weight_scale": Expected(("BF16", "F16", "F32"), (linear.grid,)),
        "weight_shape": Expected(("I64", "I32"), ((2,),)),
        "weight_zero_point": Expected(("I32",), ((-(-rows // 8), columns),), False),
        "weight_g_idx": Expected(("I32",), ((linear.in_features,),), False),
    }


def _fp8(linear: _Linear) -> dict[str, Expected]:
    scales = (*_SCALAR, (1, 1)) if linear.grid == (1, 1) else (linear.grid,)
    return {
        "weight": _float8(linear),
        "weight_scale_inv": Expected(("F32", "BF16", "F8_E8M0", "U8"), scales),
        "activation_scale": Expected(("F32", "BF16"), _SCALAR, False),
    }


def _nibbles(linear: _Linear) -> Expected:
    return Expected(("U8",), ((linear.out_features, linear.in_features // 2),))


def _float8(linear: _Linear) -> Expected:
    return Expected(("F8_E4M3",), ((linear.out_features, linear.in_features),))


_LAYOUTS: dict[tuple[str, WeightFormat], Callable[[_Linear], dict[str, Expected]]] = {
    ("modelopt", WeightFormat.NVFP4): _modelopt_nvfp4,
    ("modelopt", WeightFormat.FP8): _modelopt_fp8,
    ("compressed-tensors", WeightFormat.NVFP4): _compressed_nvfp4,
    ("compressed-tensors", WeightFormat.MXFP4): _compressed_mxfp4,
    ("compressed-tensors", WeightFormat.INT4): _compressed_int4,
    ("fp8", WeightFormat.FP8): _fp8,
}


def check_tensors(checkpoint: Checkpoint, module: str, scheme: Scheme, out_features: int, in_features: int) -> None:
    """Compare the tensors of a module with its scheme, by name, dtype and shape.

    Raises:
        CheckpointError: naming the first one that is missing, unexpected or of another dtype or shape.
    """
    expected = expected_tensors(scheme, out_features, in_features)
    present = set(checkpoint.names_under(module))
    for leaf, want in expected.items():
        name = f"{module}.{leaf}"
        if leaf in present:
            _check_tensor(name, checkpoint.tensors[name], want)
        elif want.required:
            raise CheckpointError(f"{name} is missing, which {scheme.format.value} by {scheme.dialect} needs")
    for leaf in sorted(present - set(expected) - set(KV_SCALES)):
        raise CheckpointError(f"{module}.{leaf} is unexpected in {scheme.format.value} by {scheme.dialect}")


def _check_tensor(name: str, stored: StoredTensor, want: Expected) -> None:
    if stored.dtype not in want.dtypes:
        raise CheckpointError(f"{name} is {stored.dtype}, expected {' or '.join(want.dtypes)}")
    if stored.shape not in want.shapes:
        shapes = " or ".join(str(list(shape)) for shape in want.shapes)
        raise CheckpointError(f"{name} has the shape {list(stored.shape)}, expected {shapes}")

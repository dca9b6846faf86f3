"""The tensors that a quantized linear layer consists of on disk, by dialect and format."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """One tensor of a layout. A dimension of the shape may be a set of alternatives."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True


def expected_tensors(scheme: Scheme, out_features: int, in_features: int) -> dict[str, Expected]:
    """The tensors that a linear layer of a scheme consists of, by the last part of their names.

    Raises:
        CheckpointError: the layer cannot be cut into groups of the scheme's size.
    """
    rows, columns = (size or whole for size, whole in zip(scheme.block, (out_features, in_features), strict=True))
    if scheme.format.is_four_bit and in_features % columns:
        raise CheckpointError(f"{in_features} inputs cannot be cut into groups of {columns}")
    grid = (-(-out_features // rows), -(-in_features // columns))
    scalar = ((), (1,))
    layouts = {
        ("modelopt", WeightFormat.NVFP4): {
            "weight": Expected(("U8",), ((out_features, in_features // 2),)),
            "weight_scale": Expected(("F8_E4M3",), (grid,)),
            "weight_scale_2": Expected(("F32",), scalar),
            "input_scale": Expected(("F32",), scalar, scheme.static_activation),
        },
        ("compressed-tensors", WeightFormat.NVFP4): {
            "weight_packed": Expected(("U8",), ((out_features, in_features // 2),)),
            "weight_scale": Expected(("F8_E4M3",), (grid,)),
            "weight_global_scale": Expected(("F32",), scalar),
            "input_global_scale": Expected(("F32",), scalar, scheme.static_activation),
        },
        ("compressed-tensors", WeightFormat.MXFP4): {
            "weight_packed": Expected(("U8",), ((out_features, in_features // 2),)),
            "weight_scale": Expected(("U8",), (grid,)),
        },
        ("compressed-tensors", WeightFormat.INT4): {
            "weight_packed": Expected(("I32",), ((out_features, in_features // 8),)),
            "weight_scale": Expected(("BF16", "F16", "F32"), (grid,)),
            "weight_shape": Expected(("I64", "I32"), ((2,),)),
            "weight_zero_point": Expected(("I32",), ((-(-grid[0] // 8), grid[1]),), False),
            "weight_g_idx": Expected(("I32",), ((in_features,),), False),
        },
        ("modelopt", WeightFormat.FP8): {
            "weight": Expected(("F8_E4M3",), ((out_features, in_features),)),
            "weight_scale": Expected(("F32",), scalar if grid == (1, 1) else (grid, grid[:1])),
            "input_scale": Expected(("F32",), scalar, scheme.static_activation),
        },
        ("fp8", WeightFormat.FP8): {
            "weight": Expected(("F8_E4M3",), ((out_features, in_features),)),
            "weight_scale_inv": Expected(
                ("F32", "BF16", "F8_E8M0", "U8"), (*scalar, (1, 1)) if grid == (1, 1) else (grid,)
            ),
            "activation_scale": Expected(("F32", "BF16"), scalar, False),
        },
    }  # fmt: skip
    layout = layouts.get((scheme.dialect, scheme.format))
    if layout is None:
        raise CheckpointError(f"{scheme.dialect} has no {scheme.format.value} layout that is known")
    return layout | {"bias": Expected(("F32", "BF16", "F16"), ((out_features,),), False)}


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

"""Compiles the Triton kernels for a GPU that is not here. Prints the shared memory of each variant as JSON.

The kernel that draws is among them.

compile_triton.py sm_90 bf16 "[[128, 128]]"
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hfpaged.runtime.attention import triton_launch
from hfpaged.runtime.attention.interface import AttentionParams
from hfpaged.runtime.attention.tile_tables import Tiles, TileTables
from hfpaged.runtime.device import draw_launch
from hfpaged.sampling.draw_table import NUM_NUMBERS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}


class Compiler:
    """In the place of a kernel's launcher: compiles what would be launched.

    Attributes:
        shared: bytes of shared memory that the last one takes.
    """

    def __init__(self, kernel: Any, target: GPUTarget):
        self._kernel, self._target = kernel, target
        self.shared = 0

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any) -> None:
        names = self._kernel.arg_names
        signature = {name: _type(value) for name, value in zip(names, args, strict=False)}
        constants = {**constants, **{name: None for name, kind in signature.items() if kind == "constexpr"}}
        signature.update(dict.fromkeys(constants, "constexpr"))
        aligned = [["tt.divisibility", 16]]
        attributes = {
            (i,): aligned
            for i, name in enumerate(names)
            if signature[name].startswith("*") or name.endswith(("stride_t", "stride_h"))
        }
        source = ASTSource(self._kernel, signature, constants, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.shared = compile(source, target=self._target, options=options).metadata.shared


def _type(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def target_of(name: str) -> GPUTarget:
    """Of `sm_90` or `gfx942`."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def main() -> None:
    """Compile single tokens and tiles of each pair of head dimensions, as a step would."""
    target, dtype, dims = target_of(sys.argv[1]), DTYPES[sys.argv[2]], json.loads(sys.argv[3])
    kernels = triton_launch.kernels()
    attention = Compiler(kernels.attention_kernel, target)
    numbers, none = torch.zeros(9, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    one, nothing = Tiles(numbers[:1], numbers[:1]), Tiles(none, none)
    used = {}
    with (
        mock.patch.object(kernels, "attention_kernel", attention),
        mock.patch.object(kernels, "merge_kernel", Compiler(kernels.merge_kernel, target)),
    ):
        for key_dim, value_dim in dims:
            cache = tuple(torch.zeros(1, 16, 2, dim, dtype=dtype) for dim in (key_dim, value_dim))
            query = torch.zeros(1, 8, key_dim, dtype=dtype)
            for kind, (singles, tiles) in {"single": (one, nothing), "tile": (nothing, one)}.items():
                tables = TileTables(numbers, numbers, numbers, singles, tiles, numbers)
                triton_launch.attend(cache, query, AttentionParams(1.0), tables)
                used[f"{key_dim}, {value_dim}, {kind}"] = attention.shared
    print(json.dumps({**used, "draw": draw(target, dtype)}))


def draw(target: GPUTarget, dtype: torch.dtype) -> int:
    """Compile the kernel that draws."""
    kernels = draw_launch.kernels()
    compiler = Compiler(kernels.draw_kernel, target)
    with mock.patch.object(kernels, "draw_kernel", compiler):
        tokens, numbers = torch.zeros(1, dtype=torch.int64), torch.zeros(NUM_NUMBERS, 1, dtype=torch.float64)
        draw_launch.draw_by_kernel(torch.zeros(1, 16, dtype=dtype), tokens, numbers)
    return compiler.shared


if __name__ == "__main__":
    main()

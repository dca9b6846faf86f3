"""Normalizations as leaves."""

from __future__ import annotations

import ctypes

import torch

from hfpaged.program.abi import DTYPE_CODES
from hfpaged.program.description import Norm
from hfpaged.program.native_program import NormVectors
from hfpaged.runtime.leaves.abi import LeafNorm
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Forward, Leaf, own_forward, rows_of


class NativeNorm:
    """One normalization over the present weights of its module."""

    def __init__(self, kernels: LeafKernels, norm: Norm, dtype: torch.dtype):
        self.dtype = dtype
        self._kernels = kernels
        self._width = norm.width
        self._vectors = NormVectors(norm)
        self._args = LeafNorm(weights=self._vectors.struct())
        self._input = self._args.input
        self._input.width, self._input.dtype = norm.width, DTYPE_CODES[dtype]
        self._address = ctypes.addressof(self._args)
        self._run = kernels.library.hfp_leaf_norm

    def refresh(self) -> None:
        """Take over the present weights."""
        self._vectors.copy()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Normalize rows of `width` elements of `x` into `out`, which may be `x`. Both contiguous, in `dtype`."""
        rows, args = self._input, self._args
        rows.data, rows.rows, rows.threads = x.data_ptr(), x.numel() // self._width, self._kernels.threads
        args.out = out.data_ptr()
        self._run(self._address)


class NormLeaf(Leaf):
    """A module that follows one of the known normalization formulas."""

    kind = "norm"

    def __init__(self, name: str, norm: Norm, dtype: torch.dtype, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: norm.module})
        self._gate, self._norm, self._dtype = gate, norm, dtype
        gate.norm(norm, dtype)
        self._native = NativeNorm(kernels, norm, dtype)
        self._own = own_forward(norm.module)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., width] -> [..., width]."""
        return {name: self._forward for name in self.modules}

    def refresh(self) -> None:
        """See `Leaf.refresh`."""
        self._gate.norm(self._norm, self._dtype)
        self._native.refresh()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype:
            return self._own(x)
        x = rows_of(x)
        out = torch.empty_like(x)
        self._native(x, out)
        return out

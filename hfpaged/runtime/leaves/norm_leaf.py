"""Normalizations as leaves."""

from __future__ import annotations

import torch

from hfpaged.program.description import Norm
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf, own_forward, rows_of
from hfpaged.runtime.placing import Forward


class NormLeaf(Leaf):
    """A module that follows one of the known normalization formulas."""

    kind = "norm"

    def __init__(self, name: str, norm: Norm, dtype: torch.dtype, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: norm.module})
        self._gate, self._norm, self._dtype = gate, norm, dtype
        self._own = own_forward(norm.module)
        self.admit()
        self._program = program = kernels.program(dtype)
        first = program.native.num_ops
        program.parts(gate).norm(norm, program.source, program.output())
        self._ops = program.native.ops_since(first)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., width] -> [..., width]."""
        return {name: self._forward for name in self.modules}

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.norm(self._norm, self._dtype)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype:
            return self._own(x)
        x, program, width = rows_of(x), self._program, self._norm.width
        out = torch.empty_like(x)
        program.read(x, width)
        program.write(out, width)
        program.run_small(self._ops, x.numel() // width, width)
        return out

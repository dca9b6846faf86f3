"""MLPs as leaves: both projections, the activation and the product as one native call."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from hfpaged.errors import NativeKernelError
from hfpaged.program.abi import DTYPE_CODES
from hfpaged.program.description import Mlp
from hfpaged.program.panels import PackedMatrix, interleaved_halves, side_by_side
from hfpaged.runtime.leaves.abi import LeafLinear, LeafMlp
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Forward, Leaf, own_forward, rows_of


class MlpLeaf(Leaf):
    """A module that computes down(activation(gate(x)) * up(x)), or down(activation(up(x))), and nothing else."""

    kind = "mlp"

    def __init__(self, name: str, module: nn.Module, mlp: Mlp, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: module})
        self._mlp, self._gate, self._kernels = mlp, gate, kernels
        gate.mlp(mlp)
        self._own = own_forward(module)
        self._dtype = mlp.up.weight.dtype
        self._in_features, self._out_features = mlp.up.weight.shape[1], mlp.down.out_features
        parts = side_by_side([mlp.up]) if mlp.gate is None else interleaved_halves(mlp.gate, mlp.up)
        self._inner = PackedMatrix(kernels.library, parts, self._dtype)
        self._down = PackedMatrix(kernels.library, side_by_side([mlp.down]), self._dtype)
        self._args = LeafMlp(
            inner=self._inner.weight,
            down=LeafLinear(self._down.weight, None, self._out_features),
            inner_width=mlp.up.out_features,
            gated=mlp.gate is not None,
            activation=mlp.activation,
        )
        self._input, self._output = self._args.input, self._args.down
        self._input.width, self._input.dtype = self._in_features, DTYPE_CODES[self._dtype]
        self._address = ctypes.addressof(self._args)
        self._run = kernels.library.hfp_leaf_mlp
        self._pack()

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., in_features] -> [..., out_features]."""
        return {name: self._forward for name in self.modules}

    def refresh(self) -> None:
        """See `Leaf.refresh`."""
        self._gate.mlp(self._mlp)
        self._pack()

    @property
    def matrices(self) -> list[PackedMatrix]:
        """See `Leaf.matrices`."""
        return [self._inner, self._down]

    def _pack(self) -> None:
        for matrix in self.matrices:
            matrix.pack(self._kernels.threads)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype:
            return self._own(x)
        x = rows_of(x)
        out = x.new_empty(*x.shape[:-1], self._out_features)
        rows = self._input
        rows.data, rows.rows, rows.threads = x.data_ptr(), x.numel() // self._in_features, self._kernels.threads
        self._output.out = out.data_ptr()
        if self._run(self._address):
            raise NativeKernelError("out of memory for the activations of an MLP")
        return out

"""MLPs as leaves: both projections, the activation and the product as one native call."""

from __future__ import annotations

import torch
from torch import nn

from hfpaged.program.description import Mlp
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf, own_forward, rows_of
from hfpaged.runtime.placing import Forward


class MlpLeaf(Leaf):
    """A module that computes down(activation(gate(x)) * up(x)), or down(activation(up(x))), and nothing else."""

    kind = "mlp"

    def __init__(self, name: str, module: nn.Module, mlp: Mlp, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: module})
        self._mlp, self._gate = mlp, gate
        self._own = own_forward(module)
        self.admit()
        self._dtype, self._width = mlp.up.weight.dtype, mlp.down.out_features
        self._program = program = kernels.program(self._dtype)
        parts, first = program.parts(gate), program.native.num_ops
        inner = program.between("inner", mlp.up.out_features)
        parts.mlp_inner(mlp, program.source, inner)
        parts.linear(mlp.down, inner, program.output())
        self._ops = program.native.ops_since(first)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., in_features] -> [..., out_features]."""
        return {name: self._forward for name in self.modules}

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.mlp(self._mlp)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype:
            return self._own(x)
        x, program, lead = rows_of(x), self._program, x.shape[:-1]
        out = x.new_empty(*lead, self._width)
        program.read(x, x.shape[-1])
        program.write(out, self._width)
        program.run(self._ops, lead.numel())
        return out

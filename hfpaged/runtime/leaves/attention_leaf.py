"""Attention layers as leaves."""

from __future__ import annotations

import torch

from hfpaged.program.assemble_layer import LayerOps
from hfpaged.program.description import Attention
from hfpaged.program.trace import ModuleCall
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.attending_leaf import AttendingLeaf
from hfpaged.runtime.leaves.kernels import LeafKernels


class AttentionLeaf(AttendingLeaf):
    """A module whose description is complete: it has no other parameters.

    Raises:
        FusionRefused, NotRecognized: it cannot be a leaf.
    """

    kind = "attention"

    def __init__(self, attention: Attention, call: ModuleCall, gate: LeafGate, kernels: LeafKernels):
        gate.attention(attention)
        super().__init__(attention.module, attention, call, kernels)
        self._gate = gate
        self._width = attention.output.out_features
        program = self._program
        parts, native, first = program.parts(gate), program.native, program.native.num_ops
        parts.projected(attention, self._layer, self._table, program.source, self._qkv)
        before, first = native.ops_since(first), native.num_ops
        parts.attended(attention, self._layer, self._qkv, self._attended)
        attended, first = native.ops_since(first), native.num_ops
        parts.linear(attention.output, self._attended, program.output())
        self._ops = LayerOps(before, attended, native.ops_since(first))

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.attention(self._attention)

    def _bind(self, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden.new_empty(*hidden.shape[:-1], self._width)
        self._program.read(hidden, hidden.shape[-1])
        self._program.write(output, self._width)
        return output

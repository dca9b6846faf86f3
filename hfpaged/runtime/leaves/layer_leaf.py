"""Whole decoder layers as leaves."""

from __future__ import annotations

import torch

from hfpaged.program.assemble_branches import LayerBuffers
from hfpaged.program.assemble_layer import LayerAssembler
from hfpaged.program.description import Layer
from hfpaged.program.trace import ModuleCall
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.attending_leaf import AttendingLeaf
from hfpaged.runtime.leaves.kernels import LeafKernels


class LayerLeaf(AttendingLeaf):
    """A decoder layer with an MLP, whose description is complete: it has no other parameters.

    Raises:
        FusionRefused, NotRecognized: it cannot be a leaf. Its parts may be.
    """

    kind = "layer"
    adds_to_input = True

    def __init__(self, layer: Layer, call: ModuleCall, gate: LeafGate, kernels: LeafKernels):
        gate.layer(layer)
        super().__init__(layer.module, layer.attention, call, kernels)
        self._gate, self._description = gate, layer
        program, self._width = self._program, call.input.shape[-1]
        # The residual stream is the tensor that the layer returns.
        buffers = LayerBuffers(
            width=self._width,
            hidden=program.output(),
            normed=program.between("normed", self._width),
            branch=program.between("branch", self._width),
            attended=self._attended,
            inner=program.between("inner", layer.mlp.down.in_features),
        )
        assembler = LayerAssembler(program.native, gate.of(self._dtype), buffers, self._qkv)
        self._ops = assembler.add(layer, self._layer, self._table)

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.layer(self._description)

    def _bind(self, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden.clone()
        self._program.write(output, self._width)
        return output

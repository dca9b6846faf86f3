"""Linear modules as leaves: one alone, or several that read the same tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfpaged.program.description import Linear
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf, own_forward, rows_of
from hfpaged.runtime.placing import Forward

LINEAR_CLASSES = (nn.Linear, Conv1D)


def linear_of(module: nn.Module) -> Linear:
    """How the weight of an `nn.Linear`, or of GPT-2's linear module, lies."""
    return Linear(module, transposed=isinstance(module, Conv1D))


class LinearLeaf(Leaf):
    """Modules of one width and dtype that `linear_of` describes.

    Of several, the first that is called computes what the others are going to return. That is safe whatever they are:
    they return it only for the very tensor it was computed from, if that was not written to since, and only once.
    """

    kind = "linear"

    def __init__(self, modules: Mapping[str, nn.Module], gate: LeafGate, kernels: LeafKernels):
        super().__init__(modules)
        self._gate = gate
        self._descriptions = [linear_of(module) for module in modules.values()]
        self.admit()
        self._dtype = self._descriptions[0].weight.dtype
        self._widths = [linear.out_features for linear in self._descriptions]
        self._program = program = kernels.program(self._dtype)
        parts, first = program.parts(gate), program.native.num_ops
        for index, linear in enumerate(self._descriptions):
            parts.linear(linear, program.source, program.output(index))
        self._ops = program.native.ops_since(first)
        self._own = [own_forward(module) for module in modules.values()]
        self._input: torch.Tensor | None = None
        self._version = 0
        self._waiting: list[torch.Tensor | None] = [None] * len(self._own)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., in_features] -> [..., out_features]."""
        if len(self.modules) == 1:
            return {name: self._alone for name in self.modules}
        return {name: partial(self._shared, index) for index, name in enumerate(self.modules)}

    def admit(self) -> None:
        """See `Leaf.admit`."""
        for linear in self._descriptions:
            self._gate.linear(linear)

    def _outputs(self, input: torch.Tensor) -> list[torch.Tensor]:
        x, program, lead = rows_of(input), self._program, input.shape[:-1]
        program.read(x, x.shape[-1])
        outputs = []
        for index, width in enumerate(self._widths):
            outputs.append(x.new_empty(*lead, width))
            program.write(outputs[-1], width, index)
        program.run(self._ops, lead.numel())
        return outputs

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is not self._dtype:
            return self._own[0](input)
        return self._outputs(input)[0]

    def _shared(self, index: int, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is not self._dtype:
            return self._own[index](input)
        output = self._waiting[index]
        if output is None or input is not self._input or input._version != self._version:
            self._waiting = self._outputs(input)
            self._input, self._version = input, input._version
            output = self._waiting[index]
        self._waiting[index] = None
        if not any(other is not None for other in self._waiting):
            self._input = None
        return output

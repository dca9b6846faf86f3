"""The head as a leaf: logits, or their argmax alone."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import nn

from hfpaged.errors import NativeKernelError
from hfpaged.program.abi import DTYPE_CODES, HeadOp
from hfpaged.program.description import Linear
from hfpaged.program.panels import PackedMatrix
from hfpaged.runtime.leaves.abi import LeafHead
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Forward, Leaf, own_forward, rows_of
from hfpaged.runtime.leaves.linears import Linears


class HeadLeaf(Leaf):
    """The linear module whose output is the logits.

    Where a step needs no more than their argmax, `ask_argmax` before the model's forward has the logits never written.
    """

    kind = "head"

    def __init__(self, name: str, module: nn.Linear, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: module})
        self._linear, self._gate, self._kernels = Linear(module), gate, kernels
        gate.linear(self._linear, "head_argmax")
        self._own = own_forward(module)
        self._linears = Linears(kernels, [self._linear])
        head = HeadOp(self._linears.matrices[0].weight, vocab=self._linear.out_features, multiplier=1.0, divisor=1.0)
        self._args = LeafHead(head=head)
        self._input = self._args.input
        self._input.width, self._input.dtype = self._linears.in_features, DTYPE_CODES[self._linears.dtype]
        self._asked: int | None = None
        self._argmax: np.ndarray | None = None

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., hidden] -> [..., vocab], or [..., 0] after `ask_argmax`."""
        return {name: self._forward for name in self.modules}

    def refresh(self) -> None:
        """See `Leaf.refresh`."""
        self._gate.linear(self._linear, "head_argmax")
        self._linears.refresh()

    @property
    def matrices(self) -> list[PackedMatrix]:
        """See `Leaf.matrices`."""
        return self._linears.matrices

    def ask_argmax(self, rows: int) -> None:
        """Let the next forward of the model, which keeps max(rows, 1) rows, compute the argmax of `rows` of them."""
        self._asked, self._argmax = rows, None

    def take_argmax(self) -> np.ndarray | None:
        """int64 [rows], the first of equal logits, after a forward; None if that gave logits after all."""
        argmax, self._asked, self._argmax = self._argmax, None, None
        return argmax

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is not self._linears.dtype:
            return self._own(input)
        input, lead = rows_of(input), input.shape[:-1]
        if self._asked is None or lead.numel() != max(self._asked, 1):
            return self._linears(input, lead)[0]
        self._argmax = self._argmax_of(input, self._asked)
        return input.new_empty((*lead, 0))

    def _argmax_of(self, input: torch.Tensor, rows: int) -> np.ndarray:
        argmax = np.empty(rows, dtype=np.int64)
        self._input.data, self._input.rows, self._input.threads = input.data_ptr(), rows, self._kernels.threads
        self._args.argmax = argmax.ctypes.data
        if rows and self._kernels.library.hfp_leaf_head(ctypes.addressof(self._args)):
            raise NativeKernelError("out of memory for the argmax of the logits")
        return argmax

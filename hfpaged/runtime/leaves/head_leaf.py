"""The head as a leaf: logits, or their argmax alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hfpaged.program.description import Linear, LogitScaling
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf, own_forward, rows_of
from hfpaged.runtime.placing import Forward


class HeadLeaf(Leaf):
    """The linear module whose output is the logits.

    Where a step needs no more than their argmax, `ask_argmax` before the model's forward has the logits never written.
    """

    kind = "head"

    def __init__(self, name: str, module: nn.Linear, gate: LeafGate, kernels: LeafKernels):
        super().__init__({name: module})
        self._linear, self._gate = Linear(module), gate
        self._own = own_forward(module)
        self.admit()
        self._dtype, self._vocab = self._linear.weight.dtype, self._linear.out_features
        self._program = program = kernels.program(self._dtype)
        parts, first = program.parts(gate), program.native.num_ops
        packed = parts.head(self._linear, LogitScaling(), program.sampled)
        self._argmax_ops, first = program.native.ops_since(first), program.native.num_ops
        parts.linear(self._linear, program.source, program.output(), packed)
        self._logits_ops = program.native.ops_since(first)
        self._asked: int | None = None
        self._argmax: np.ndarray | None = None

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. [..., hidden] -> [..., vocab], or [..., 0] after `ask_argmax`."""
        return {name: self._forward for name in self.modules}

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.head(self._linear)

    def ask_argmax(self, rows: int) -> None:
        """Let the next forward of the model, which keeps max(rows, 1) rows, compute the argmax of `rows` of them."""
        self._asked, self._argmax = rows, None

    def take_argmax(self) -> np.ndarray | None:
        """int64 [rows], the first of equal logits, after a forward; None if that gave logits after all."""
        argmax, self._asked, self._argmax = self._argmax, None, None
        return argmax

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is not self._dtype:
            return self._own(input)
        x, lead = rows_of(input), input.shape[:-1]
        if self._asked is None or lead.numel() != max(self._asked, 1):
            return self._logits(x, lead)
        self._argmax = np.empty(self._asked, dtype=np.int64)
        if self._asked:
            self._program.read(x, x.shape[-1], self._program.sampled)
            self._program.run_head(self._argmax_ops, self._argmax)
        return x.new_empty((*lead, 0))

    def _logits(self, x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
        logits = x.new_empty(*lead, self._vocab)
        self._program.read(x, x.shape[-1])
        self._program.write(logits, self._vocab)
        self._program.run(self._logits_ops, lead.numel())
        return logits

"""AttendingLeaf: what a whole attention layer and a whole decoder layer have in common as leaves."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from hfpaged.program.abi import RotaryStyle
from hfpaged.program.assemble_layer import LayerOps
from hfpaged.program.assemble_parts import qkv_width
from hfpaged.program.description import Attention, NotRecognized
from hfpaged.program.trace import ModuleCall
from hfpaged.runtime.attention.interface import AttentionParams
from hfpaged.runtime.leaves.argument import Argument
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf, own_forward, rows_of
from hfpaged.runtime.paged_attention import StepContext
from hfpaged.runtime.placing import Forward


class AttendingLeaf(Leaf):
    """A module with one attention layer in it, as one native call around and including the paged attention.

    Args:
        call: the traced call of the module.

    Raises:
        NotRecognized: its arguments, its result or its keys and values are none that the call could have.
    """

    _ops: LayerOps

    def __init__(self, module: nn.Module, attention: Attention, call: ModuleCall, kernels: LeafKernels):
        super().__init__({call.name: module})
        self._attention = attention
        self._own = own_forward(module)
        self._dtype = attention.query.weight.dtype
        self._step: StepContext = vars(attention.module)["_hfpaged_step"]
        self._kv = self._step.layers[id(attention.module)]
        if self._kv.key.dtype != self._dtype:
            raise NotRecognized(f"its keys and values are {self._kv.key.dtype}, its projections {self._dtype}")
        self._hidden = Argument.in_call(call, lambda value: value is call.input)
        self._embeddings = None
        if attention.rotation.style != RotaryStyle.NONE:
            self._embeddings = Argument.in_call(call, _is_pair_of_tensors)
        self._nones = _nones_beside_output(call)
        self._program = program = kernels.program(self._dtype)
        self._qkv = program.between("qkv", qkv_width(attention))
        self._attended = program.between("attended", attention.output.in_features)
        self._layer = program.add_layer(attention, self._kv)
        self._table = program.table(attention.rotation.form)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. Hidden states [..., hidden], among the arguments that the traced call had."""
        return {name: self._forward for name in self.modules}

    @abstractmethod
    def _bind(self, hidden: torch.Tensor) -> torch.Tensor:
        """Have the operations read `hidden`, contiguous. Returns the tensor that they are going to write."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._hidden.of(args, kwargs)
        if hidden.dtype is not self._dtype:
            return self._own(*args, **kwargs)
        program, rows = self._program, hidden.shape[:-1].numel()
        output = self._bind(rows_of(hidden))
        if self._embeddings is not None:
            program.use_table(self._attention.rotation.form, *self._embeddings.of(args, kwargs))
        if program.is_attending:
            program.run_attention(self._ops.whole, rows)
        else:
            self._run_in_pieces(rows)
        return output if self._nones is None else (output, *self._nones)

    def _run_in_pieces(self, rows: int) -> None:
        """Outside a step of requests, attend by whatever stands in for the paged attention."""
        attention, native = self._attention, self._program.native
        self._program.run_rotation(self._ops.before, rows)
        qkv = native.buffer(self._qkv, rows, qkv_width(attention))
        widths = [linear.out_features for linear in (attention.query, attention.key, attention.value)]
        counts = (attention.heads, attention.kv_heads, attention.kv_heads)
        states = (part.unflatten(-1, (count, -1)) for part, count in zip(qkv.split(widths, -1), counts, strict=True))
        attended = self._step.attend(attention.module, *states, self._params())
        native.buffer(self._attended, rows, attention.output.in_features).copy_(attended.flatten(1))
        self._program.run(self._ops.after, rows)

    def _params(self) -> AttentionParams:
        attention = self._attention
        sinks = None if attention.sinks is None else getattr(attention.module, attention.sinks).detach()
        return AttentionParams(attention.scale, attention.window or None, attention.softcap or None, sinks)


def _nones_beside_output(call: ModuleCall) -> tuple[None, ...] | None:
    """What the module returns after its output; None if it returns the output alone."""
    if isinstance(call.output, torch.Tensor):
        return None
    if not isinstance(call.output, tuple) or any(other is not None for other in call.output[1:]):
        raise NotRecognized(f"{call.name} returns more than its output")
    return call.output[1:]


def _is_pair_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, torch.Tensor) for part in value)

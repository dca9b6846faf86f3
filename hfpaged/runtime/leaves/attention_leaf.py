"""Attention layers as leaves: projections, norms, rotation and output natively, around the engine's paged attention."""

from __future__ import annotations

from typing import Any

import torch

from hfpaged.program.abi import RotaryStyle
from hfpaged.program.assemble_parts import qkv_width
from hfpaged.program.description import Attention, NotRecognized
from hfpaged.program.trace import ModuleCall
from hfpaged.runtime.attention.interface import AttentionParams
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.argument import Argument
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Forward, Leaf, own_forward, rows_of
from hfpaged.runtime.step import StepContext


class AttentionLeaf(Leaf):
    """A module whose description is complete: it has no other parameters.

    Args:
        call: the traced call of the module.

    Raises:
        FusionRefused, NotRecognized: it cannot be a leaf.
    """

    kind = "attention"

    def __init__(self, attention: Attention, call: ModuleCall, gate: LeafGate, kernels: LeafKernels):
        super().__init__({call.name: attention.module})
        self._attention, self._gate = attention, gate
        self._own = own_forward(attention.module)
        self.admit()
        self._dtype, self._width = attention.query.weight.dtype, attention.output.out_features
        self._step: StepContext = vars(attention.module)["_hfpaged_step"]
        self._hidden = Argument.in_call(call, lambda value: value is call.input)
        self._embeddings = None
        if attention.rotation.style != RotaryStyle.NONE:
            self._embeddings = Argument.in_call(call, _is_pair_of_tensors)
        self._nones = _nones_beside_output(call)
        self._program = kernels.program(self._dtype)
        self._append(gate)

    def _append(self, gate: LeafGate) -> None:
        """The operations, in three pieces that run as one where they can."""
        attention, program = self._attention, self._program
        parts, native = program.parts(gate), program.native
        kv = self._step.layers[id(attention.module)]
        if kv.key.dtype != self._dtype:
            raise NotRecognized(f"its keys and values are {kv.key.dtype}, its projections {self._dtype}")
        layer, table = program.add_layer(attention, kv), program.table(attention.rotation.form)
        self._qkv = program.between("qkv", qkv_width(attention))
        self._attended = program.between("attended", attention.output.in_features)
        first = native.num_ops
        parts.projected(attention, layer, table, program.source, self._qkv)
        self._projection = native.ops_since(first)
        parts.attended(attention, layer, self._qkv, self._attended)
        last = native.num_ops
        parts.linear(attention.output, self._attended, program.output())
        self._last, self._whole = native.ops_since(last), native.ops_since(first)

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. Hidden states [..., hidden], among the arguments that the traced call had."""
        return {name: self._forward for name in self.modules}

    def admit(self) -> None:
        """See `Leaf.admit`."""
        self._gate.attention(self._attention)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._hidden.of(args, kwargs)
        if hidden.dtype is not self._dtype:
            return self._own(*args, **kwargs)
        hidden, program = rows_of(hidden), self._program
        lead = hidden.shape[:-1]
        output = hidden.new_empty(*lead, self._width)
        program.read(hidden, hidden.shape[-1])
        program.write(output, self._width)
        if self._embeddings is not None:
            program.use_table(self._attention.rotation.form, *self._embeddings.of(args, kwargs))
        if program.is_attending:
            program.run_attention(self._whole, lead.numel())
        else:
            self._run_in_pieces(lead.numel())
        return output if self._nones is None else (output, *self._nones)

    def _run_in_pieces(self, rows: int) -> None:
        """Outside a step of requests, attend by whatever stands in for the paged attention."""
        attention, native = self._attention, self._program.native
        self._program.run_rotation(self._projection, rows)
        qkv = native.buffer(self._qkv, rows, qkv_width(attention))
        widths = [linear.out_features for linear in (attention.query, attention.key, attention.value)]
        counts = (attention.heads, attention.kv_heads, attention.kv_heads)
        states = (part.unflatten(-1, (count, -1)) for part, count in zip(qkv.split(widths, -1), counts, strict=True))
        attended = self._step.attend(attention.module, *states, self._params())
        native.buffer(self._attended, rows, attention.output.in_features).copy_(attended.flatten(1))
        self._program.run(self._last, rows)

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

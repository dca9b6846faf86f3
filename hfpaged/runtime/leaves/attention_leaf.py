"""Attention layers as leaves: projections, norms, rotation and output natively, around the engine's paged attention."""

from __future__ import annotations

from typing import Any

import torch

from hfpaged.program.abi import RotaryStyle
from hfpaged.program.description import Attention, NotRecognized
from hfpaged.program.panels import PackedMatrix
from hfpaged.program.trace import ModuleCall
from hfpaged.runtime.attention.interface import AttentionParams
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.angles import Angles
from hfpaged.runtime.leaves.argument import Argument
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Forward, Leaf, own_forward, rows_of
from hfpaged.runtime.leaves.linears import Linears
from hfpaged.runtime.leaves.norm_leaf import NativeNorm
from hfpaged.runtime.leaves.rotation import NativeRotation
from hfpaged.runtime.step import StepContext


class AttentionLeaf(Leaf):
    """A module whose description is complete: it has no other parameters.

    Args:
        call: the traced call of the module.

    Raises:
        FusionRefused, NotRecognized: it cannot be a leaf.
    """

    kind = "attention"

    def __init__(self, attention: Attention, call: ModuleCall, gate: LeafGate, kernels: LeafKernels, angles: Angles):
        super().__init__({call.name: attention.module})
        self._attention, self._gate = attention, gate
        gate.attention(attention)
        self._own = own_forward(attention.module)
        self._dtype = attention.query.weight.dtype
        self._step: StepContext = vars(attention.module)["_hfpaged_step"]
        self._hidden = Argument.in_call(call, lambda value: value is call.input)
        self._nones = _nones_beside_output(call)
        shapes = [(attention.heads, attention.key_dim)]
        shapes += [(attention.kv_heads, dim) for dim in (attention.key_dim, attention.value_dim)]
        self._projections = Linears(kernels, [attention.query, attention.key, attention.value], shapes)
        self._output = Linears(kernels, [attention.output])
        self._query_norm, self._key_norm = (
            None if norm is None else NativeNorm(kernels, norm, self._dtype)
            for norm in (attention.query_norm, attention.key_norm)
        )
        self._rotation = None
        if attention.rotation.style != RotaryStyle.NONE:
            self._embeddings = Argument.in_call(call, _is_pair_of_tensors)
            self._rotation = NativeRotation(kernels, attention, self._dtype, angles)
        self._params = self._present_params()

    def forwards(self) -> dict[str, Forward]:
        """See `Leaf.forwards`. Hidden states [..., hidden], among the arguments that the traced call had."""
        return {name: self._forward for name in self.modules}

    def refresh(self) -> None:
        """See `Leaf.refresh`."""
        self._gate.attention(self._attention)
        for part in (self._projections, self._output, self._query_norm, self._key_norm):
            if part is not None:
                part.refresh()
        self._params = self._present_params()

    @property
    def matrices(self) -> list[PackedMatrix]:
        """See `Leaf.matrices`."""
        return self._projections.matrices + self._output.matrices

    def _present_params(self) -> AttentionParams:
        attention = self._attention
        sinks = None if attention.sinks is None else getattr(attention.module, attention.sinks).detach()
        return AttentionParams(attention.scale, attention.window or None, attention.softcap or None, sinks)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._hidden.of(args, kwargs)
        if hidden.dtype is not self._dtype:
            return self._own(*args, **kwargs)
        hidden = rows_of(hidden)
        lead = hidden.shape[:-1]
        query, key, value = self._projections(hidden, (lead.numel(),))
        if self._query_norm is not None:
            self._query_norm(query, query)
        if self._key_norm is not None:
            self._key_norm(key, key)
        if self._rotation is not None:
            self._rotation(query, key, self._embeddings.of(args, kwargs))
        attended = self._step.attend(self._attention.module, query, key, value, self._params)
        output = self._output(attended, lead)[0]
        return output if self._nones is None else (output, *self._nones)


def _nones_beside_output(call: ModuleCall) -> tuple[None, ...] | None:
    """What the module returns after its output; None if it returns the output alone."""
    if isinstance(call.output, torch.Tensor):
        return None
    if not isinstance(call.output, tuple) or any(other is not None for other in call.output[1:]):
        raise NotRecognized(f"{call.name} returns more than its output")
    return call.output[1:]


def _is_pair_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, torch.Tensor) for part in value)

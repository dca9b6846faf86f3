"""Turns the description of a decoder layer into operations."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.program import abi
from hfpaged.program.abi import OpKind
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble_branches import BranchAssembler, LayerBuffers
from hfpaged.program.assemble_parts import PartsAssembler
from hfpaged.program.description import Layer
from hfpaged.program.native_program import NativeProgram, OpRange


@dataclass(frozen=True)
class LayerOps:
    """Operations of one layer: up to its attention over the cache, that, and what follows."""

    before: OpRange
    attention: OpRange
    after: OpRange

    @property
    def whole(self) -> OpRange:
        """All of them."""
        return OpRange(self.before.first, self.after.end)


class LayerAssembler:
    """Appends the operations of decoder layers to a program. `add` is the entry point.

    Args:
        buffers: of all tokens.
        qkv: another one, of queries, keys and values.
    """

    def __init__(self, program: NativeProgram, gate: Gatekeeper, buffers: LayerBuffers, qkv: int):
        self._program = program
        self._gate = gate
        self._buffers = buffers
        self._qkv = qkv
        self._parts = PartsAssembler(program, gate)
        self._branches = BranchAssembler(program, gate, buffers)

    def add(self, layer: Layer, index: int, table: int, sampled: LayerBuffers | None = None) -> LayerOps:
        """Append a layer.

        Args:
            index: of the layer's keys and values.
            table: index of its rotary table.
            sampled: of the sampled rows, if nothing but these is needed of the layer's output: it is in `hidden` there.

        Raises:
            FusionRefused: a guard shuts out a part of it.
        """
        program, first = self._program, self._program.num_ops
        source = self._branches.normalized(layer.attention_norm)
        self._parts.projected(layer.attention, index, table, source, self._qkv)
        before, first = program.ops_since(first), program.num_ops
        self._parts.attended(layer.attention, index, self._qkv, self._buffers.attended)
        attention, first = program.ops_since(first), program.num_ops
        if sampled is None:
            self._branches.add(layer, source)
        else:
            source = self._gather_samples(layer, source, sampled)
            BranchAssembler(program, self._gate, sampled).add(layer, source)
        return LayerOps(before, attention, program.ops_since(first))

    def _gather_samples(self, layer: Layer, source: int, sampled: LayerBuffers) -> int:
        """Append the copies of the sampled rows that the rest of the layer reads. Returns what `source` is there."""
        buffers, output = self._buffers, layer.attention.output
        gathers = [
            abi.GatherSamplesOp(buffers.hidden, sampled.hidden, buffers.width),
            abi.GatherSamplesOp(buffers.attended, sampled.attended, output.in_features),
        ]
        if layer.shared_norm and source == buffers.normed:
            gathers.append(abi.GatherSamplesOp(buffers.normed, sampled.normed, buffers.width))
        admission = self._gate.linear(output, residual=True)
        for gather in gathers:
            self._program.add(admission, OpKind.GATHER_SAMPLES, gather)
        return sampled.normed if source == buffers.normed else sampled.hidden

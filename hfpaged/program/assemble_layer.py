"""Turns the description of a decoder layer into operations."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.program import abi
from hfpaged.program.abi import Activation, Epilogue, OpKind, RowSet
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble_parts import PartsAssembler
from hfpaged.program.description import Experts, Layer, Linear, Norm
from hfpaged.program.native_program import NativeProgram, OpRange
from hfpaged.program.panels import interleaved_halves, side_by_side


@dataclass(frozen=True)
class LayerBuffers:
    """Buffers that layers use one after the other. Those not named below are needed within a layer only.

    Attributes:
        width: of a row of the residual stream.
        hidden: the residual stream, which a layer reads and adds to.
    """

    width: int
    hidden: int
    normed: int
    branch: int
    qkv: int
    attended: int
    inner: int


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
    """Appends the operations of decoder layers to a program. `add` is the entry point."""

    def __init__(self, program: NativeProgram, gate: Gatekeeper, buffers: LayerBuffers):
        self._program = program
        self._gate = gate
        self._buffers = buffers
        self._parts = PartsAssembler(program, gate)

    def add(self, layer: Layer, index: int, table: int) -> LayerOps:
        """Append a layer.

        Args:
            index: of the layer's keys and values.
            table: index of its rotary table.

        Raises:
            FusionRefused: a guard shuts out a part of it.
        """
        buffers, program, first = self._buffers, self._program, self._program.num_ops
        source = self._normalized(layer.attention_norm)
        self._parts.projected(layer.attention, index, table, source, buffers.qkv)
        before, first = program.ops_since(first), program.num_ops
        self._parts.attended(layer.attention, index, buffers.qkv, buffers.attended)
        attention, first = program.ops_since(first), program.num_ops
        self._add_branch(layer, layer.attention.output, buffers.attended, layer.attention_out_norm, layer.parallel)
        if not layer.shared_norm:
            source = self._normalized(layer.mlp_norm)
        if isinstance(layer.mlp, Experts):
            self._add_experts(layer, layer.mlp, source)
        else:
            self._parts.mlp_inner(layer.mlp, source, buffers.inner)
            self._add_branch(layer, layer.mlp.down, buffers.inner, layer.mlp_out_norm)
        return LayerOps(before, attention, program.ops_since(first))

    def _normalized(self, norm: Norm | None) -> int:
        if norm is None:
            return self._buffers.hidden
        self._parts.norm(norm, self._buffers.hidden, self._buffers.normed)
        return self._buffers.normed

    def _add_norm_to_residual(self, norm: Norm, multiplier: float) -> None:
        """hidden += norm(branch) * multiplier"""
        weights, buffers = self._program.norm_weights(norm), self._buffers
        struct = abi.NormOp(weights, buffers.branch, buffers.hidden, 0, 0, 1, norm.width, buffers.hidden, multiplier)
        self._program.add(self._gate.norm(norm), OpKind.NORM, struct)

    def _add_branch(
        self, layer: Layer, linear: Linear, source: int, norm: Norm | None, first_of_two: bool = False
    ) -> None:
        """The projection that ends a branch: into the residual stream, or aside until the other branch joins it."""
        width, buffers = self._buffers.width, self._buffers
        if norm is not None or first_of_two:
            self._parts.linear(linear, source, buffers.branch)
            if norm is not None:
                self._add_norm_to_residual(norm, layer.branch_multiplier)
            return
        weight = self._program.pack(side_by_side([linear]))
        struct = abi.ProductOp(weight, source, buffers.hidden, width, Epilogue.RESIDUAL)
        struct.multiplier = layer.branch_multiplier
        struct.other = buffers.branch if layer.parallel else -1
        self._program.add(self._gate.linear(linear, residual=True), OpKind.PRODUCT, struct)

    def _add_experts(self, layer: Layer, moe: Experts, source: int) -> None:
        """Router, pairs in the order of their experts, both products of every expert, and the sum of each token."""
        program, width, count = self._program, self._buffers.width, len(moe.experts)
        inner = moe.experts[0].down.in_features
        logits = program.add_buffer(count)
        pairs, pairs_inner = (program.add_buffer(size, RowSet.EXPERT_PAIRS) for size in (width, inner))
        self._parts.linear(moe.router, source, logits)
        routed = self._gate.router(moe)
        route = abi.RouteOp(logits, count, moe.chosen, moe.normalize, moe.round_weights)
        program.add(routed, OpKind.ROUTE, route)
        program.add(routed, OpKind.ORDER_PAIRS, abi.OrderPairsOp(count, moe.chosen))
        program.add(routed, OpKind.GATHER_PAIRS, abi.GatherPairsOp(source, pairs, width, moe.chosen))
        self._add_expert_products(moe, (pairs, pairs_inner), (inner, width))
        norm, buffers = layer.mlp_out_norm, self._buffers
        out, residual = (buffers.hidden, buffers.hidden) if norm is None else (buffers.branch, -1)
        combine = abi.CombineOp(pairs, out, width, moe.chosen, residual, layer.branch_multiplier)
        program.add(routed, OpKind.COMBINE, combine)
        if norm is not None:
            self._add_norm_to_residual(norm, layer.branch_multiplier)

    def _add_expert_products(self, moe: Experts, buffers: tuple[int, int], widths: tuple[int, int]) -> None:
        program, count, experts = self._program, len(moe.experts), moe.experts
        gate_up = program.weight_array([program.pack(interleaved_halves(each.gate, each.up)) for each in experts])
        down = program.weight_array([program.pack(side_by_side([each.down])) for each in experts])
        up_op = abi.ExpertsOp(gate_up, count, *buffers, widths[0], Epilogue.GATED, experts[0].activation)
        down_op = abi.ExpertsOp(down, count, *reversed(buffers), widths[1], Epilogue.STORE, Activation.NONE)
        up_admissions = [self._gate.gate_up(each) for each in experts]
        down_admissions = [self._gate.linear(each.down) for each in experts]
        program.add(up_admissions[0], OpKind.EXPERTS, up_op)
        program.add(down_admissions[0], OpKind.EXPERTS, down_op)

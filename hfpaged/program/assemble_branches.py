"""Turns what follows the attention of a decoder layer into operations: the ends of both branches, and the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.program import abi
from hfpaged.program.abi import Activation, Epilogue, OpKind
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble_parts import PartsAssembler
from hfpaged.program.description import Experts, Layer, Linear, Norm
from hfpaged.program.native_program import NativeProgram
from hfpaged.program.panels import interleaved_halves, side_by_side


@dataclass(frozen=True)
class PairBuffers:
    """Buffers of the pairs of a row and one of its experts.

    Attributes:
        outer: what an expert's first product reads, and its second writes.
        inner: between the two.
    """

    outer: int
    inner: int


@dataclass(frozen=True)
class LayerBuffers:
    """Buffers that layers use one after the other. Those not named below are needed within a layer only.

    Attributes:
        width: of a row of the residual stream.
        hidden: the residual stream, which a layer reads and adds to.
        router_logits, pairs: needed where a layer has experts.
    """

    width: int
    hidden: int
    normed: int
    branch: int
    attended: int
    inner: int
    router_logits: int | None = None
    pairs: PairBuffers | None = None


class BranchAssembler:
    """Appends the operations that follow the attention of layers, over buffers of the same rows. `add` appends all."""

    def __init__(self, program: NativeProgram, gate: Gatekeeper, buffers: LayerBuffers):
        self._program = program
        self._gate = gate
        self._buffers = buffers
        self._parts = PartsAssembler(program, gate)

    def add(self, layer: Layer, source: int) -> None:
        """Append the rest of a layer.

        Args:
            source: buffer that the projections of the attention read.

        Raises:
            FusionRefused: a guard shuts out a part of it.
        """
        buffers = self._buffers
        self._end_branch(layer, layer.attention.output, buffers.attended, layer.attention_out_norm, layer.parallel)
        if not layer.shared_norm:
            source = self.normalized(layer.mlp_norm)
        if isinstance(layer.mlp, Experts):
            self._add_experts(layer, layer.mlp, source)
        else:
            self._parts.mlp_inner(layer.mlp, source, buffers.inner)
            self._end_branch(layer, layer.mlp.down, buffers.inner, layer.mlp_out_norm)

    def normalized(self, norm: Norm | None) -> int:
        """Append the norm that begins a branch, if there is one. Returns the buffer that the branch reads."""
        if norm is None:
            return self._buffers.hidden
        self._parts.norm(norm, self._buffers.hidden, self._buffers.normed)
        return self._buffers.normed

    def _add_norm_to_residual(self, norm: Norm, multiplier: float) -> None:
        """hidden += norm(branch) * multiplier"""
        weights, buffers = self._program.norm_weights(norm), self._buffers
        struct = abi.NormOp(weights, buffers.branch, buffers.hidden, 0, 0, 1, norm.width, buffers.hidden, multiplier)
        self._program.add(self._gate.norm(norm), OpKind.NORM, struct)

    def _end_branch(
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
        """Router, pairs in the order of their experts, both products of every expert, and the sum of each row."""
        program, width, count = self._program, self._buffers.width, len(moe.experts)
        logits, pairs = self._buffers.router_logits, self._buffers.pairs.outer
        self._parts.linear(moe.router, source, logits)
        routed = self._gate.router(moe)
        route = abi.RouteOp(logits, count, moe.chosen, moe.normalize, moe.round_weights)
        program.add(routed, OpKind.ROUTE, route)
        program.add(routed, OpKind.ORDER_PAIRS, abi.OrderPairsOp(logits, count, moe.chosen))
        program.add(routed, OpKind.GATHER_PAIRS, abi.GatherPairsOp(source, pairs, width, moe.chosen))
        self._add_expert_products(moe)
        norm, buffers = layer.mlp_out_norm, self._buffers
        out, residual = (buffers.hidden, buffers.hidden) if norm is None else (buffers.branch, -1)
        combine = abi.CombineOp(pairs, out, width, moe.chosen, residual, layer.branch_multiplier)
        program.add(routed, OpKind.COMBINE, combine)
        if norm is not None:
            self._add_norm_to_residual(norm, layer.branch_multiplier)

    def _add_expert_products(self, moe: Experts) -> None:
        program, experts, pairs = self._program, moe.experts, self._buffers.pairs
        count, inner_width = len(experts), experts[0].down.in_features
        gate_up = program.weight_array([program.pack(interleaved_halves(each.gate, each.up)) for each in experts])
        down = program.weight_array([program.pack(side_by_side([each.down])) for each in experts])
        up_op = abi.ExpertsOp(gate_up, count, pairs.outer, pairs.inner, inner_width, Epilogue.GATED)
        up_op.activation = experts[0].activation
        down_op = abi.ExpertsOp(down, count, pairs.inner, pairs.outer, self._buffers.width, Epilogue.STORE)
        down_op.activation = Activation.NONE
        up_admissions = [self._gate.gate_up(each) for each in experts]
        down_admissions = [self._gate.linear(each.down) for each in experts]
        program.add(up_admissions[0], OpKind.EXPERTS, up_op)
        program.add(down_admissions[0], OpKind.EXPERTS, down_op)

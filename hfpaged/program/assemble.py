"""Turns the description of a model into the operations of a native program."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.fusion.registry import Admission
from hfpaged.program import abi
from hfpaged.program.abi import Activation, Epilogue, OpKind, RowSet
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.description import Attention, Experts, Layer, Linear, Mlp, Model, Norm
from hfpaged.program.native_program import NativeProgram, OpRange
from hfpaged.program.panels import Part, interleaved_halves, side_by_side


@dataclass(frozen=True)
class ProgramLayout:
    """Where to find what in an assembled program: embedding first, then the layers, then the head.

    Attributes:
        hidden: buffer of the residual stream.
        layers: operations of each decoder layer.
        end: operations in total.
    """

    hidden: int
    layers: tuple[OpRange, ...]
    end: int


@dataclass(frozen=True)
class _Buffers:
    hidden: int
    normed: int
    branch: int
    qkv: int
    attended: int
    inner: int
    sampled: int


class Assembler:
    """Appends the operations of one model to an empty program. `assemble` is the entry point."""

    def __init__(self, program: NativeProgram, model: Model, gate: Gatekeeper):
        self._program = program
        self._model = model
        self._gate = gate
        width = model.hidden_size
        self._buffers = _Buffers(
            hidden=program.add_buffer(width),
            normed=program.add_buffer(width),
            branch=program.add_buffer(width),
            qkv=program.add_buffer(max(_qkv_width(layer.attention) for layer in model.layers)),
            attended=program.add_buffer(max(layer.attention.output.in_features for layer in model.layers)),
            inner=program.add_buffer(max(_inner_width(layer.mlp) for layer in model.layers)),
            sampled=program.add_buffer(width, RowSet.SAMPLES),
        )

    def assemble(self) -> ProgramLayout:
        """Append everything.

        Raises:
            FusionRefused: a guard shuts out a part of the model.
        """
        model, buffers, program = self._model, self._buffers, self._program
        program.add_embedding(self._gate.embedding(), model.embedding, buffers.hidden, model.embedding_scale)
        layers = []
        for index, layer in enumerate(model.layers):
            first = program.num_ops
            self._add_layer(index, layer)
            layers.append(OpRange(first, program.num_ops))
        self._add_norm(model.final_norm, buffers.hidden, buffers.sampled)
        scaling = model.logit_scaling
        head, screen = program.pack_head(side_by_side([model.head]), scaling)
        struct = abi.HeadOp(head, screen, buffers.sampled, model.head.out_features)
        struct.multiplier, struct.divisor, struct.softcap = scaling.multiplier, scaling.divisor, scaling.softcap
        program.add(self._gate.head(), OpKind.HEAD, struct)
        return ProgramLayout(buffers.hidden, tuple(layers), program.num_ops)

    def _add_layer(self, index: int, layer: Layer) -> None:
        buffers = self._buffers
        source = self._normalized(layer.attention_norm)
        self._add_attention(index, layer.attention, source)
        self._add_branch(layer, layer.attention.output, buffers.attended, layer.attention_out_norm, layer.parallel)
        if not layer.shared_norm:
            source = self._normalized(layer.mlp_norm)
        if isinstance(layer.mlp, Experts):
            self._add_experts(layer, layer.mlp, source)
        else:
            self._add_mlp_inner(layer.mlp, source)
            self._add_branch(layer, layer.mlp.down, buffers.inner, layer.mlp_out_norm)

    def _normalized(self, norm: Norm | None) -> int:
        if norm is None:
            return self._buffers.hidden
        self._add_norm(norm, self._buffers.hidden, self._buffers.normed)
        return self._buffers.normed

    def _add_norm(self, norm: Norm, source: int, out: int, column: int = 0) -> None:
        weights = self._program.norm_weights(norm)
        struct = abi.NormOp(weights, source, out, column, column, 1, norm.width, -1, 1.0)
        self._program.add(self._gate.norm(norm), OpKind.NORM, struct)

    def _add_norm_to_residual(self, norm: Norm, multiplier: float) -> None:
        """hidden += norm(branch) * multiplier"""
        weights, buffers = self._program.norm_weights(norm), self._buffers
        struct = abi.NormOp(weights, buffers.branch, buffers.hidden, 0, 0, 1, norm.width, buffers.hidden, multiplier)
        self._program.add(self._gate.norm(norm), OpKind.NORM, struct)

    def _add_attention(self, index: int, attention: Attention, source: int) -> None:
        buffers, program = self._buffers, self._program
        linears = [attention.query, attention.key, attention.value]
        admissions = [self._gate.linear(linear) for linear in linears]
        self._add_product(admissions[0], side_by_side(linears), source, buffers.qkv, _qkv_width(attention))
        query_width = attention.heads * attention.key_dim
        for norm, column in ((attention.query_norm, 0), (attention.key_norm, query_width)):
            if norm is not None and norm.width != attention.key_dim:
                self._add_norm(norm, buffers.qkv, buffers.qkv, column)
        shape = abi.AttentionShape(index, attention.heads, attention.kv_heads, attention.key_dim, attention.value_dim)
        self._add_rotation(attention, shape)
        struct = abi.AttentionOp(shape, buffers.qkv, buffers.attended, attention.window)
        struct.scale, struct.softcap = attention.scale, attention.softcap
        struct.sinks = program.sinks(attention.module, attention.sinks)
        program.add(self._gate.attention(attention), OpKind.ATTENTION, struct)

    def _add_rotation(self, attention: Attention, shape: abi.AttentionShape) -> None:
        """Norms over single heads, rotation, and the write to the cache."""
        per_head = [
            norm if norm is not None and norm.width == attention.key_dim else None
            for norm in (attention.query_norm, attention.key_norm)
        ]
        struct = abi.RotateAndStoreOp(shape, *(self._program.norm_weights(norm) for norm in per_head))
        struct.qkv = self._buffers.qkv
        rotation = attention.rotation
        struct.rotary_dim, struct.style = rotation.width, rotation.style
        struct.round_products = rotation.round_products
        struct.table = self._program.rotary_table(attention.rotary, rotation.form)
        self._program.add(self._gate.rotary(attention), OpKind.ROTATE_AND_STORE, struct)

    def _add_branch(
        self, layer: Layer, linear: Linear, source: int, norm: Norm | None, first_of_two: bool = False
    ) -> None:
        """The projection that ends a branch: into the residual stream, or aside until the other branch joins it."""
        parts, width, buffers = side_by_side([linear]), self._model.hidden_size, self._buffers
        if norm is not None or first_of_two:
            self._add_product(self._gate.linear(linear), parts, source, buffers.branch, width)
            if norm is not None:
                self._add_norm_to_residual(norm, layer.branch_multiplier)
            return
        struct = abi.ProductOp(self._program.pack(parts), source, buffers.hidden, width, Epilogue.RESIDUAL)
        struct.multiplier = layer.branch_multiplier
        struct.other = buffers.branch if layer.parallel else -1
        self._program.add(self._gate.linear(linear, residual=True), OpKind.PRODUCT, struct)

    def _add_mlp_inner(self, mlp: Mlp, source: int) -> None:
        inner, width = self._buffers.inner, mlp.up.out_features
        if mlp.gate is None:
            parts = side_by_side([mlp.up])
            self._add_product(self._gate.linear(mlp.up), parts, source, inner, width, activation=mlp.activation)
        else:
            parts = interleaved_halves(mlp.gate, mlp.up)
            self._add_product(self._gate.gate_up(mlp), parts, source, inner, width, Epilogue.GATED, mlp.activation)

    def _add_product(
        self,
        admission: Admission,
        parts: list[Part],
        source: int,
        out: int,
        width: int,
        epilogue: Epilogue = Epilogue.STORE,
        activation: Activation = Activation.NONE,
    ) -> None:
        weight = self._program.pack(parts)
        struct = abi.ProductOp(weight, source, out, width, epilogue, activation, 1.0, -1)
        self._program.add(admission, OpKind.PRODUCT, struct)

    def _add_experts(self, layer: Layer, moe: Experts, source: int) -> None:
        """Router, pairs in the order of their experts, both products of every expert, and the sum of each token."""
        program, width, count = self._program, self._model.hidden_size, len(moe.experts)
        inner = moe.experts[0].down.in_features
        logits = program.add_buffer(count)
        pairs, pairs_inner = (program.add_buffer(size, RowSet.EXPERT_PAIRS) for size in (width, inner))
        self._add_product(self._gate.linear(moe.router), side_by_side([moe.router]), source, logits, count)
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


def _qkv_width(attention: Attention) -> int:
    return attention.query.out_features + attention.key.out_features + attention.value.out_features


def _inner_width(mlp: Mlp | Experts) -> int:
    # Experts have buffers of their own, for pairs instead of tokens.
    return 1 if isinstance(mlp, Experts) else mlp.down.in_features

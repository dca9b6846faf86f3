"""Turns the descriptions of single parts of a model into operations: what step programs and leaves have in common."""

from __future__ import annotations

from hfpaged.fusion.registry import Admission
from hfpaged.program import abi
from hfpaged.program.abi import Activation, Epilogue, OpKind
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.description import Attention, Linear, LogitScaling, Mlp, Norm
from hfpaged.program.native_program import NativeProgram
from hfpaged.program.panels import interleaved_halves, side_by_side


class PartsAssembler:
    """Appends the operations of one part to a program, from one buffer to another.

    Every method raises FusionRefused where a guard shuts out the part.
    """

    def __init__(self, program: NativeProgram, gate: Gatekeeper):
        self._program = program
        self._gate = gate

    def linear(self, linear: Linear, source: int, out: int, packed: abi.PackedWeight | None = None) -> None:
        """A linear module, whose weight may be packed already."""
        weight = self._program.pack(side_by_side([linear])) if packed is None else packed
        self._product(self._gate.linear(linear), weight, source, out, linear.out_features)

    def head(self, head: Linear, scaling: LogitScaling, source: int) -> abi.PackedWeight:
        """The argmax of the sampled rows' logits, and these if the step asks for them. Returns the packed weight."""
        weight, screen = self._program.pack_head(side_by_side([head]), scaling)
        struct = abi.HeadOp(weight, screen, source, head.out_features)
        struct.multiplier, struct.divisor, struct.softcap = scaling.multiplier, scaling.divisor, scaling.softcap
        self._program.add(self._gate.head(head), OpKind.HEAD, struct)
        return weight

    def norm(self, norm: Norm, source: int, out: int, column: int = 0) -> None:
        """A normalization of the columns from `column` on."""
        weights = self._program.norm_weights(norm)
        struct = abi.NormOp(weights, source, out, column, column, 1, norm.width, -1, 1.0)
        self._program.add(self._gate.norm(norm), OpKind.NORM, struct)

    def mlp_inner(self, mlp: Mlp, source: int, out: int) -> None:
        """An MLP up to its second product."""
        width = mlp.up.out_features
        if mlp.gate is None:
            weight = self._program.pack(side_by_side([mlp.up]))
            self._product(self._gate.linear(mlp.up), weight, source, out, width, activation=mlp.activation)
        else:
            weight = self._program.pack(interleaved_halves(mlp.gate, mlp.up))
            self._product(self._gate.gate_up(mlp), weight, source, out, width, Epilogue.GATED, mlp.activation)

    def projected(self, attention: Attention, layer: int, table: int, source: int, qkv: int) -> None:
        """Queries, keys and values, normalized and rotated as the layer does it, and the write to the cache.

        Args:
            layer: index of the layer's keys and values.
            table: index of its rotary table.
        """
        linears = [attention.query, attention.key, attention.value]
        admissions = [self._gate.linear(linear) for linear in linears]
        self._product(admissions[0], self._program.pack(side_by_side(linears)), source, qkv, qkv_width(attention))
        query_width = attention.heads * attention.key_dim
        for norm, column in ((attention.query_norm, 0), (attention.key_norm, query_width)):
            if norm is not None and norm.width != attention.key_dim:
                self.norm(norm, qkv, qkv, column)
        self._rotation(attention, layer, table, qkv)

    def attended(self, attention: Attention, layer: int, qkv: int, out: int) -> None:
        """Attention over the cache, for the queries in `qkv`."""
        struct = abi.AttentionOp(_shape(attention, layer), qkv, out, attention.window)
        struct.scale, struct.softcap = attention.scale, attention.softcap
        struct.sinks = self._program.sinks(attention.module, attention.sinks)
        self._program.add(self._gate.attention(attention), OpKind.ATTENTION, struct)

    def _rotation(self, attention: Attention, layer: int, table: int, qkv: int) -> None:
        """Norms over single heads, rotation, and the write to the cache."""
        per_head = [
            norm if norm is not None and norm.width == attention.key_dim else None
            for norm in (attention.query_norm, attention.key_norm)
        ]
        norms = (self._program.norm_weights(norm) for norm in per_head)
        struct = abi.RotateAndStoreOp(_shape(attention, layer), *norms)
        rotation = attention.rotation
        struct.qkv, struct.table = qkv, table
        struct.rotary_dim, struct.style = rotation.width, rotation.style
        struct.round_products = rotation.round_products
        self._program.add(self._gate.rotary(attention), OpKind.ROTATE_AND_STORE, struct)

    def _product(
        self,
        admission: Admission,
        weight: abi.PackedWeight,
        source: int,
        out: int,
        width: int,
        epilogue: Epilogue = Epilogue.STORE,
        activation: Activation = Activation.NONE,
    ) -> None:
        struct = abi.ProductOp(weight, source, out, width, epilogue, activation, 1.0, -1)
        self._program.add(admission, OpKind.PRODUCT, struct)


def qkv_width(attention: Attention) -> int:
    """Columns of the merged projections."""
    return attention.query.out_features + attention.key.out_features + attention.value.out_features


def _shape(attention: Attention, layer: int) -> abi.AttentionShape:
    return abi.AttentionShape(layer, attention.heads, attention.kv_heads, attention.key_dim, attention.value_dim)

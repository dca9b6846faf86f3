"""Turns the description of a model into the operations of a native program."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.program.abi import RowSet
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble_layer import LayerAssembler, LayerBuffers
from hfpaged.program.assemble_parts import PartsAssembler, qkv_width
from hfpaged.program.description import Experts, Mlp, Model
from hfpaged.program.native_program import NativeProgram, OpRange


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


class Assembler:
    """Appends the operations of one model to an empty program. `assemble` is the entry point.

    Attributes:
        model: what is assembled.
        gate: what admits its parts.
    """

    def __init__(self, program: NativeProgram, model: Model, gate: Gatekeeper):
        self.model = model
        self.gate = gate
        self._program = program
        width = model.hidden_size
        self._sampled = program.add_buffer(width, RowSet.SAMPLES)
        self._buffers = LayerBuffers(
            width=width,
            hidden=program.add_buffer(width),
            normed=program.add_buffer(width),
            branch=program.add_buffer(width),
            qkv=program.add_buffer(max(qkv_width(attention) for attention in model.attention_layers)),
            attended=program.add_buffer(max(attention.output.in_features for attention in model.attention_layers)),
            inner=program.add_buffer(max(_inner_width(layer.mlp) for layer in model.layers)),
        )

    def assemble(self) -> ProgramLayout:
        """Append everything.

        Raises:
            FusionRefused: a guard shuts out a part of the model.
        """
        model, buffers, program = self.model, self._buffers, self._program
        admission = self.gate.embedding(model.embedding)
        program.add_embedding(admission, model.embedding, buffers.hidden, model.embedding_scale)
        assembler = LayerAssembler(program, self.gate, buffers)
        layers = []
        for index, layer in enumerate(model.layers):
            table = program.rotary_table(layer.attention.rotary, layer.attention.rotation.form)
            layers.append(assembler.add(layer, index, table).whole)
        parts = PartsAssembler(program, self.gate)
        parts.norm(model.final_norm, buffers.hidden, self._sampled)
        parts.head(model.head, model.logit_scaling, self._sampled)
        return ProgramLayout(buffers.hidden, tuple(layers), program.num_ops)


def _inner_width(mlp: Mlp | Experts) -> int:
    # Experts have buffers of their own, for pairs instead of tokens.
    return 1 if isinstance(mlp, Experts) else mlp.down.in_features

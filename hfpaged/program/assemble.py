"""Turns the description of a model into the operations of a native program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpaged.program.abi import RowSet
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble_branches import LayerBuffers, PairBuffers
from hfpaged.program.assemble_layer import LayerAssembler, LayerOps
from hfpaged.program.assemble_parts import PartsAssembler, qkv_width
from hfpaged.program.description import Experts, Layer, Mlp, Model
from hfpaged.program.native_program import NativeProgram


@dataclass(frozen=True)
class ProgramLayout:
    """Where to find what in an assembled program: embedding first, then the layers, then the head.

    Attributes:
        hidden: buffer of the residual stream.
        sampled_hidden: buffer of the sampled rows of the last layer's output, of which nothing else is computed.
        layers: operations of each decoder layer.
        end: operations in total.
    """

    hidden: int
    sampled_hidden: int
    layers: tuple[LayerOps, ...]
    end: int

    @property
    def end_without_samples(self) -> int:
        """Operations of a step that samples nothing: the last that it needs writes the last layer's keys and values."""
        return self.layers[-1].before.end


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
        self._pairs = self._add_pair_buffers()
        self._qkv = program.add_buffer(max(qkv_width(attention) for attention in model.attention_layers))
        self._buffers = self._add_buffers(model.layers, RowSet.TOKENS)
        self._sampled = self._add_buffers(model.layers[-1:], RowSet.SAMPLES)

    def assemble(self) -> ProgramLayout:
        """Append everything.

        Raises:
            FusionRefused: a guard shuts out a part of the model.
        """
        model, buffers, sampled, program = self.model, self._buffers, self._sampled, self._program
        admission = self.gate.embedding(model.embedding)
        program.add_embedding(admission, model.embedding, buffers.hidden, model.embedding_scale)
        assembler = LayerAssembler(program, self.gate, buffers, self._qkv)
        layers = []
        for index, layer in enumerate(model.layers):
            table = program.rotary_table(layer.attention.rotary, layer.attention.rotation.form)
            is_last = index == len(model.layers) - 1
            layers.append(assembler.add(layer, index, table, sampled if is_last else None))
        parts = PartsAssembler(program, self.gate)
        parts.norm(model.final_norm, sampled.hidden, sampled.normed)
        parts.head(model.head, model.logit_scaling, sampled.normed)
        return ProgramLayout(buffers.hidden, sampled.hidden, tuple(layers), program.num_ops)

    def _add_buffers(self, layers: Sequence[Layer], rows: RowSet) -> LayerBuffers:
        program, width = self._program, self.model.hidden_size
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, Mlp)]
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Experts)]
        return LayerBuffers(
            width=width,
            hidden=program.add_buffer(width, rows),
            normed=program.add_buffer(width, rows),
            branch=program.add_buffer(width, rows),
            attended=program.add_buffer(max(layer.attention.output.in_features for layer in layers), rows),
            inner=program.add_buffer(max((mlp.down.in_features for mlp in mlps), default=1), rows),
            router_logits=program.add_buffer(max((len(mixture.experts) for mixture in mixtures), default=1), rows),
            pairs=self._pairs,
        )

    def _add_pair_buffers(self) -> PairBuffers | None:
        mixtures = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, Experts)]
        if not mixtures:
            return None
        widths = (self.model.hidden_size, max(mixture.experts[0].down.in_features for mixture in mixtures))
        return PairBuffers(*(self._program.add_buffer(width, RowSet.EXPERT_PAIRS) for width in widths))

"""Checks a fresh program against the traced forward of the modules: embedding, every layer, and the head.

Each layer starts from the residual stream that its module got, so that a fault shows where it is and errors of one
layer do not hide in the next.
"""

from __future__ import annotations

import numpy as np
import torch

from hfpaged.native.kv_layout import KVLayout
from hfpaged.program.assemble import ProgramLayout
from hfpaged.program.description import Experts, Model, NotRecognized
from hfpaged.program.native_program import NativeProgram, OpRange
from hfpaged.program.step_arrays import CachePointers, StepArrays, make_step
from hfpaged.program.trace import Trace

BLOCK_SIZE = 16
# Root mean square of a row's difference, relative to that of what the layer adds.
_LAYER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class Verifier:
    """Runs parts of a program on the inputs that a trace recorded."""

    def __init__(self, native: NativeProgram, model: Model, layout: ProgramLayout, trace: Trace):
        self._native = native
        self._model = model
        self._layout = layout
        self._trace = trace
        batch = _arrays_of(trace)
        rows = np.arange(len(batch.token_ids), dtype=np.int64)
        self._argmax = np.empty(len(rows), dtype=np.int64)
        self._logits = torch.empty(len(rows), model.head.out_features)
        native.prepare_positions(int(trace.positions.max()) + 1)
        cache = CachePointers(_scratch_cache(model, batch), model.attention_layers, model.dtype, BLOCK_SIZE)
        self._step = make_step(batch, cache, rows)
        self._step.argmax, self._step.logits = self._argmax.ctypes.data, self._logits.data_ptr()
        self._step.threads = 1

    def check(self) -> None:
        """Compare everything.

        Raises:
            NotRecognized: naming the first part whose result differs from its module's.
        """
        calls = [self._trace.calls_of(layer.module)[0] for layer in self._model.layers]
        layers = [ops.whole for ops in self._layout.layers]
        self._run(OpRange(0, layers[0].first))
        hidden = self._rows(self._layout.hidden)
        if not torch.equal(hidden, calls[0].input.reshape(hidden.shape)):
            raise NotRecognized("the program's embedding differs from the model's")
        for layer, call, ops in zip(self._model.layers, calls, layers, strict=True):
            before, after = (tensor.reshape(hidden.shape) for tensor in (call.input, call.result))
            hidden.copy_(before)
            self._run(ops)
            # All rows are sampled ones here.
            output = self._rows(self._layout.sampled_hidden if ops is layers[-1] else self._layout.hidden)
            errors = row_errors(output, after, after.float() - before.float())
            # Where experts are chosen, a near tie may fall the other way: most rows must agree, not all.
            error = errors.quantile(0.7 if isinstance(layer.mlp, Experts) else 1.0).item()
            if not error <= _LAYER_TOLERANCE[hidden.dtype]:
                raise NotRecognized(f"{call.name} computes something else than the program (error {error:.1e})")
        output.copy_(calls[-1].result.reshape(output.shape))
        self._run(OpRange(layers[-1].end, self._layout.end))
        logits = self._trace.logits.float()
        error = row_errors(self._logits, logits, logits).max().item()
        if not error <= _LAYER_TOLERANCE[hidden.dtype]:
            raise NotRecognized(f"the program's logits differ from the model's (error {error:.1e})")

    def _run(self, ops: OpRange) -> None:
        self._native.run(self._step, ops)

    def _rows(self, buffer: int) -> torch.Tensor:
        """A buffer of the residual stream in the program's own memory, [T, hidden]."""
        return self._native.buffer(buffer, self._step.tokens, self._model.hidden_size)


def _arrays_of(trace: Trace) -> StepArrays:
    """The traced sequence as one request in blocks 0, 1, ..."""
    tokens = len(trace.token_ids)
    blocks = -(-tokens // BLOCK_SIZE)
    return StepArrays(
        token_ids=trace.token_ids.numpy().copy(),
        positions=trace.positions.numpy().copy(),
        slots=np.arange(tokens, dtype=np.int64),
        query_start=np.array([0, tokens], dtype=np.int32),
        context_len=np.array([tokens], dtype=np.int32),
        table_rows=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        block_size=BLOCK_SIZE,
    )


def _scratch_cache(model: Model, batch: StepArrays) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of all layers, just large enough for the batch."""
    num_blocks = batch.block_tables.size
    layouts = [
        KVLayout(num_blocks, BLOCK_SIZE, shape.kv_heads, shape.key_dim, shape.value_dim)
        for shape in model.attention_layers
    ]
    return [layout.views(torch.zeros(layout.memory_shape, dtype=model.dtype)) for layout in layouts]


def row_errors(got: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """RMS of each row's difference relative to that of `scale`, less what rounding `expected` to its dtype costs."""
    got, epsilon = got.float(), torch.finfo(got.dtype).eps

    def rms(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().square().mean(-1).sqrt()

    return (rms(got - expected.float()) - epsilon * rms(expected)).clamp_min(0) / rms(scale).clamp_min(1e-30)

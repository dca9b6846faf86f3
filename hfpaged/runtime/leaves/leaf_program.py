"""LeafProgram: the operations of all leaves of one dtype, which a step runs in pieces between stock's code."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch

from hfpaged.errors import NativeKernelError
from hfpaged.program import abi
from hfpaged.program.abi import RowSet
from hfpaged.program.assemble_parts import PartsAssembler
from hfpaged.program.description import Attention, TableForm
from hfpaged.program.native_program import NativeProgram, OpRange
from hfpaged.program.rotary import shaped_table
from hfpaged.program.step_arrays import CachePointers, make_step
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.usage import CpuUsage
from hfpaged.runtime.paged_attention import LayerKV

# A call is worth several threads for this much work at least; one thread does about so many elements of norms a second.
_THREAD_SECONDS = 3e-5
_ELEMENTS_PER_SECOND = 2e9
_NO_ROWS = np.empty(0, dtype=np.int64)


class LeafProgram:
    """Operations over buffers that all leaves share. Used by one thread at a time.

    A leaf reads the rows of one tensor and writes others, which are bound to buffers at every call; what lies between
    has buffers of its own.

    Attributes:
        native: the operations.
        dtype: of all tensors.
        threads: most threads of a call at present.
        by_rows: whether each of them may get rows of its own where there are many.
        source, sampled: buffers of what a leaf reads: rows, and rows to give the argmax of their logits.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, usage: CpuUsage):
        self.native = NativeProgram(library, dtype)
        self.dtype = dtype
        self.threads = 1
        self.by_rows = False
        self.source = self.native.add_buffer(1)
        self.sampled = self.native.add_buffer(1, RowSet.SAMPLES)
        self._usage = usage
        self._outputs: list[int] = []
        self._between: dict[tuple[str, int], int] = {}
        self._tables: dict[TableForm, _StepTable] = {}
        self._attention: list[Attention] = []
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cache: CachePointers | None = None
        self._row_numbers = _NO_ROWS
        self._plain = abi.Step()
        self._attending: abi.Step | None = None
        self._batches = 0

    # ---- what leaves are made of ----

    def parts(self, gate: LeafGate) -> PartsAssembler:
        """Appends operations that `gate` admits."""
        return PartsAssembler(self.native, gate.of(self.dtype))

    def output(self, index: int = 0) -> int:
        """Buffer of the `index`-th tensor that a leaf writes."""
        while index >= len(self._outputs):
            self._outputs.append(self.native.add_buffer(1))
        return self._outputs[index]

    def between(self, use: str, width: int) -> int:
        """A buffer for rows that are needed within a call only."""
        if (use, width) not in self._between:
            self._between[use, width] = self.native.add_buffer(width)
        return self._between[use, width]

    def table(self, form: TableForm) -> int:
        """Index of the rotary table that `use_table` sets."""
        return self._tables.setdefault(form, _StepTable(len(self._tables))).index

    def add_layer(self, attention: Attention, kv: LayerKV) -> int:
        """Index of an attention layer, whose operations may then use its keys and values."""
        self._attention.append(attention)
        self._kv.append((kv.key, kv.value))
        return len(self._kv) - 1

    # ---- steps ----

    @property
    def is_attending(self) -> bool:
        """Whether a step has begun, so that attention layers can run as a whole."""
        return self._attending is not None

    def begin(self, batch: StepBatch) -> None:
        """Have attention layers attend to the requests of `batch` until `end`."""
        if not self._kv:
            return
        if self._cache is None or not self._cache.serves(self._kv, batch.block_size):
            self._cache = CachePointers(self._kv, self._attention, self.dtype, batch.block_size)
        step = make_step(batch, self._cache, _NO_ROWS)
        # A row of the tables is of a token of the step, whatever its position.
        step.token_ids = None
        self._batches += 1
        step.batch_number = self._batches
        self._attending = self._numbered(step, step.tokens, "positions")

    def end(self) -> None:
        """The step is over: let go of what it was given."""
        self._attending = None
        for table in self._tables.values():
            table.forget()

    def use_table(self, form: TableForm, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Rotate by what a rotary module returned for the tokens of the step, [1, T, any] or [T, any] in any dtype."""
        table = self._tables[form]
        if table.take(form, cosine, sine):
            self.native.set_table(table.index, *table.taken)

    # ---- calls ----

    def read(self, x: torch.Tensor, width: int, buffer: int | None = None) -> None:
        """Have the next call read rows of `width` elements from `x`, contiguous."""
        self.native.bind_buffer(self.source if buffer is None else buffer, x.data_ptr(), width)

    def write(self, out: torch.Tensor, width: int, index: int = 0) -> None:
        """Have the next call write rows of `width` elements to `out`, contiguous."""
        self.native.bind_buffer(self._outputs[index], out.data_ptr(), width)

    def run(self, ops: OpRange, rows: int) -> None:
        """Run operations on `rows` rows, on all threads."""
        if rows:
            self._run(self._plain, ops, rows, self.threads)

    def run_small(self, ops: OpRange, rows: int, width: int) -> None:
        """Run operations on `rows` rows that do little for each of `width` elements, on one thread if that will do."""
        is_large = rows * width > _THREAD_SECONDS * _ELEMENTS_PER_SECOND
        if rows:
            self._run(self._plain, ops, rows, self.threads if is_large else 1)

    def run_attention(self, ops: OpRange, rows: int) -> None:
        """Run operations on the tokens of the step that has begun, of which there must be so many."""
        if rows != self._attending.tokens:
            raise NativeKernelError(f"an attention layer got {rows} rows in a step of {self._attending.tokens} tokens")
        self._run(self._attending, ops, rows, self.threads)

    def run_rotation(self, ops: OpRange, rows: int) -> None:
        """Run operations that rotate, but store nothing, outside a step."""
        self._run(self._numbered(abi.Step(), rows, "positions"), ops, rows, self.threads)

    def run_head(self, ops: OpRange, argmax: np.ndarray) -> None:
        """Run a head on as many rows as `argmax` has."""
        rows = len(argmax)
        step = abi.Step(samples=rows, argmax=argmax.ctypes.data)
        self._run(self._numbered(step, rows, "sample_rows"), ops, rows, self.threads)

    def _run(self, step: abi.Step, ops: OpRange, rows: int, threads: int) -> None:
        step.tokens, step.threads, step.by_rows = rows, threads, self.by_rows
        start = time.perf_counter()
        self.native.run(step, ops)
        self._usage.add(time.perf_counter() - start, threads, step.cpu_seconds)

    def _numbered(self, step: abi.Step, count: int, field: str) -> abi.Step:
        """The step with 0, 1, ..., `count` - 1 in a field."""
        if count > len(self._row_numbers):
            self._row_numbers = np.arange(2 * count, dtype=np.int64)
        step.numbers = self._row_numbers  # kept alive
        setattr(step, field, self._row_numbers.ctypes.data)
        return step


class _StepTable:
    """Cosines and sines of the tokens of one step, as the kernels read them.

    All layers are given the same few tensors, so each is converted once as long as they are given the same in a row.
    """

    def __init__(self, index: int):
        self.index = index
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self._given: torch.Tensor | None = None
        self.taken: Sequence[torch.Tensor] = ()

    def take(self, form: TableForm, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
        """Convert them, fp32 [T, width], unless they are those of the last call. Returns whether they are others."""
        if cosine is self._given:
            return False
        flat = (part.reshape(-1, part.shape[-1]) for part in (cosine, sine))
        self._given = cosine
        self.taken = [shaped_table(part, form).float().contiguous() for part in flat]
        return True

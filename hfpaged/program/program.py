"""StepProgram: a model's forward over a paged KV cache as one native call per step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.native import library as native_library
from hfpaged.program import abi
from hfpaged.program.admission import Gatekeeper
from hfpaged.program.assemble import Assembler, ProgramLayout
from hfpaged.program.description import NotRecognized
from hfpaged.program.logits_memory import LogitsMemory
from hfpaged.program.native_program import NativeProgram, OpRange
from hfpaged.program.panels import PackedMatrix
from hfpaged.program.recognize import recognize_model
from hfpaged.program.rotary import require_fixed_frequencies
from hfpaged.program.step_arrays import CachePointers, KVPairs, StepArrays, address_of, make_step
from hfpaged.program.threads import MIN_THREAD_SECONDS, ThreadPolicy, single_thread_seconds
from hfpaged.program.trace import trace_forward
from hfpaged.program.verify import Verifier


class StepProgram:
    """Runs packed steps of one model. One thread at a time may use it; the GIL is released while it computes.

    Results do not depend on what else is in a step, on how a prompt is cut into steps, or on the number of threads.

    Attributes:
        description: what was recognized.
        threads: picks the number of threads of each step; may be replaced by another policy between two steps.
    """

    def __init__(self, native: NativeProgram, assembler: Assembler, layout: ProgramLayout, threads: ThreadPolicy):
        self.description = assembler.model
        self.threads = threads
        self._native = native
        self._layout = layout
        self._gate = assembler.gate
        # Sums over all matrices, which every step asks for.
        self._num_bytes, self._num_weights = native.packed_bytes, native.num_elements
        self._num_sampled_weights = assembler.model.sampled_weights
        self._cache: CachePointers | None = None
        self._memory = LogitsMemory()

    @classmethod
    def build(
        cls,
        model: PreTrainedModel,
        num_threads: int,
        registry: FusionRegistry | None = None,
        min_thread_seconds: float = MIN_THREAD_SECONDS,
    ) -> StepProgram:
        """Recognize `model` from one forward of a few random tokens, pack its weights, and verify every layer.

        Args:
            model: plain modules without hooks, on the CPU, in evaluation mode.
            num_threads: most threads of a step (`threads.usable_cpus` knows quotas). Small steps use fewer, and so does
                a machine whose cores are busy.
            registry: counts what the fusion guards refuse.
            min_thread_seconds: work that is worth another thread; 0 always uses all.

        Raises:
            NotRecognized: with the reason. The model is as it was.
        """
        require_fixed_frequencies(model)
        trace = trace_forward(model)
        description = recognize_model(model, trace)
        gate = Gatekeeper(registry or FusionRegistry(), description.dtype)
        native = NativeProgram(abi.declare(native_library.load()), description.dtype)
        assembler = Assembler(native, description, gate)
        try:
            layout = assembler.assemble()
        except FusionRefused as refused:
            raise NotRecognized(str(refused)) from refused
        native.refresh(None, num_threads)
        Verifier(native, description, layout, trace).check()
        return cls(native, assembler, layout, ThreadPolicy(num_threads, min_thread_seconds))

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights, which the live parameters do not share."""
        return self._native.packed_bytes - self._native.shared_bytes

    def read_bytes(self, rows: int) -> int:
        """Memory of weights that a step reads which samples `rows` rows and wants no logits."""
        return self._native.read_bytes(rows)

    @property
    def packed_matrices(self) -> list[PackedMatrix]:
        """The packed weights."""
        return self._native.packed_matrices

    def multiply_adds(self, tokens: int, samples: int) -> int:
        """Of all products with weights in a step, were every expert chosen."""
        sampled = self._num_sampled_weights
        return (self._num_weights - sampled) * tokens + sampled * samples

    def repack(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Take over weights that changed: of `modules`, or of all.

        Raises:
            NotRecognized: a weight changed its shape, dtype or device; build a new program.
        """
        try:
            self._gate.admit_all(self.description)
        except FusionRefused as refused:
            raise NotRecognized(str(refused)) from refused
        self._native.refresh(None if modules is None else set(modules), self.threads.limit)

    def run(
        self,
        batch: StepArrays,
        kv: KVPairs,
        sample_rows: np.ndarray,
        want_logits: bool = False,
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Run one step: write the keys and values of its tokens, and compute the sampled rows' logits.

        Args:
            batch: T tokens.
            kv: (key, value) tensors of each attention layer, in the order they run, in the native layout. Checked when
                another sequence is passed than last time; never replace a tensor inside of one.
            sample_rows: int64 [S], indices into the T tokens. May be empty.
            want_logits: whether the logits are needed beside their argmax.

        Returns:
            (argmax, logits): int64 [S], the first of equal logits as torch.argmax has it; and fp32 [S, V] of values
            rounded to the model's dtype, or None.

        Raises:
            NativeKernelError: the batch does not fit the tables or the cache. Nothing was computed.
        """
        argmax = np.empty(len(sample_rows), dtype=np.int64)
        logits = self._memory.take(len(sample_rows), self.description.head.out_features) if want_logits else None
        step = self._step(batch, kv, sample_rows, argmax)
        step.logits = None if logits is None else logits.data_ptr()
        self._run_timed(step)
        return argmax, logits

    def profile(self, batch: StepArrays, kv: KVPairs, sample_rows: np.ndarray) -> dict[str, float]:
        """Run one step as `run` does, and return the seconds that its operations took, added up by their label."""
        argmax = np.empty(len(sample_rows), dtype=np.int64)
        seconds = np.zeros(self._native.num_ops)
        step = self._step(batch, kv, sample_rows, argmax)
        step.op_seconds = seconds.ctypes.data
        self._run_timed(step)
        totals: Counter[str] = Counter()
        for label, spent in zip(self._native.labels, seconds.tolist(), strict=True):
            totals[label] += spent
        return dict(totals)

    def _step(self, batch: StepArrays, kv: KVPairs, sample_rows: np.ndarray, argmax: np.ndarray) -> abi.Step:
        self._native.prepare_positions(int(batch.context_len.max()))
        if self._cache is None or not self._cache.serves(kv, batch.block_size):
            model = self.description
            self._cache = CachePointers(kv, model.attention_layers, model.dtype, batch.block_size)
        step = make_step(batch, self._cache, sample_rows)
        step.argmax = address_of(argmax, np.int64)
        return step

    def _run_timed(self, step: abi.Step) -> None:
        layout = self._layout
        ops = OpRange(0, layout.end if step.samples else layout.end_without_samples)
        estimate = single_thread_seconds(self._num_bytes, self.multiply_adds(step.tokens, step.samples))
        step.threads, step.by_rows = self.threads.choose(estimate), self.threads.can_split_rows(estimate)
        start = time.perf_counter()
        self._native.run(step, ops)
        seconds = time.perf_counter() - start
        self.threads.record(estimate, seconds, step.cpu_seconds / (seconds * step.threads))

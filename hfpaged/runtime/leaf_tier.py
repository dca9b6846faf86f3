"""LeafTier: the view's own forward with native linear modules, norms, MLPs, attention layers and head in it."""

from __future__ import annotations

import time

from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.program.panels import PackedMatrix
from hfpaged.program.threads import ThreadPolicy, single_thread_seconds
from hfpaged.runtime.attention.interface import AttentionBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.leaves.leaves import Leaves
from hfpaged.runtime.module_tier import ModuleTier
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier import StepOutput, Tier
from hfpaged.runtime.view import EngineView


class LeafTier(Tier):
    """Runs the view's modules, most of which have a native forward while this object lives.

    In bf16 too, what the native modules compute for a token depends on nothing else in the step.

    Args:
        view: its step must be bound.
        num_threads: most threads of a step. Small steps use fewer, and so does a machine whose cores are busy.
        fusions: admits what becomes native.

    Attributes:
        threads: picks the number of threads of each step; may be replaced by another policy between two steps.

    Raises:
        NotRecognized: no module of the view can run natively.
    """

    name = "leaves"

    def __init__(
        self,
        view: EngineView,
        backend: AttentionBackend,
        state: ThreadState,
        num_threads: int,
        fusions: FusionRegistry,
    ):
        self.threads = ThreadPolicy(num_threads)
        self._view = view
        self._fusions = fusions
        self._modules = ModuleTier(view, backend, state)
        self._leaves: Leaves | None = Leaves(view, fusions)
        self._num_bytes = sum(parameter.nbytes for parameter in view.model.parameters())
        self._num_weights = sum(parameter.numel() for parameter in view.model.parameters())
        self._keeps_rows = view.model._supports_logits_to_keep()

    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        if self._leaves is None:
            return self._modules.run(batch, want_logits)
        head = None if want_logits or not self._keeps_rows else self._leaves.head
        if head is not None:
            head.ask_argmax(len(batch.logit_rows))
        estimate = self._seconds(len(batch.token_ids))
        threads, start, argmax = self.threads.choose(estimate), time.perf_counter(), None
        try:
            with self._leaves.kernels.stepping(batch, threads, self.threads.can_split_rows(estimate)):
                output = self._modules.run(batch, want_logits)
        finally:
            if head is not None:
                argmax = head.take_argmax()
        self.threads.record(estimate, time.perf_counter() - start, self._leaves.kernels.usage.had_cpu)
        return output if argmax is None else StepOutput(None, argmax)

    def refusals(self) -> dict[str, int]:
        """See `Tier.refusals`."""
        leaves = self._leaves  # other threads ask, and the stepping thread may replace it meanwhile
        return {} if leaves is None else dict(leaves.refusals)

    def packed_matrices(self) -> list[PackedMatrix]:
        """See `Tier.packed_matrices`."""
        return [] if self._leaves is None else self._leaves.matrices

    def on_weights_changed(self) -> None:
        """Pack the new weights. What cannot be a leaf any more runs as it is from now on."""
        if self._leaves is not None and not self._is_refreshed(self._leaves):
            self.close()
            self._leaves = self._found_anew()

    def close(self) -> None:
        """See `Tier.close`. By its modules it can run on."""
        if self._leaves is not None:
            self._leaves.remove()
            self._leaves = None

    @staticmethod
    def _is_refreshed(leaves: Leaves) -> bool:
        try:
            leaves.refresh()
        except (FusionRefused, NotRecognized):
            return False
        return True

    def _found_anew(self) -> Leaves | None:
        try:
            return Leaves(self._view, self._fusions)
        except NotRecognized:
            return None

    def _seconds(self, tokens: int) -> float:
        """Rough time of a step of `tokens` tokens on one thread."""
        return single_thread_seconds(self._num_bytes, tokens * self._num_weights)

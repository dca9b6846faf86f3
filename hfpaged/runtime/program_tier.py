"""ProgramTier: a step as one native program over packed weights."""

from __future__ import annotations

from hfpaged.program.panels import PackedMatrix
from hfpaged.program.program import StepProgram
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.tier import StepOutput, Tier


class ProgramTier(Tier):
    """The whole step as one native program over packed weights."""

    name = "program"

    def __init__(self, program: StepProgram, cache: KVCache):
        self._program = program
        self._kv = [(layer.key, layer.value) for layer in cache.layers]

    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        argmax, logits = self._program.run(batch, self._kv, batch.logit_rows, want_logits)
        return StepOutput(logits, argmax)

    def on_weights_changed(self) -> None:
        self._program.repack()

    def packed_matrices(self) -> list[PackedMatrix]:
        """See `Tier.packed_matrices`."""
        return self._program.packed_matrices

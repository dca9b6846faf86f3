"""How a step's forward is executed: by the model's own module code, or as one native program made from it.

A third way, in between, is in leaf_tier.py. All read the same batch and the same KV pool, and give the same logits up
to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from hfpaged.program.panels import PackedMatrix
from hfpaged.program.program import StepProgram
from hfpaged.runtime.attention.interface import AttentionBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.view import EngineView


class StepOutput(NamedTuple):
    """What a step computed for the S rows that wanted logits.

    Attributes:
        logits: [S, V] in the model's dtype or its values in fp32; None if only the argmax was asked for and is there.
        argmax: int64 [S], where the tier computes it on the way.
        drawn: int64 [N] on the device: a token for each of `StepBatch.draws`, where the tier draws.
    """

    logits: torch.Tensor | None
    argmax: np.ndarray | torch.Tensor | None
    drawn: torch.Tensor | None = None


class Tier(ABC):
    """One way to run the forward of a step. Used by the stepping thread only."""

    name: str

    @abstractmethod
    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        """Write the batch's keys and values and compute the logits of `batch.logit_rows`."""

    @abstractmethod
    def on_weights_changed(self) -> None:
        """Forget everything made from the old weights."""

    def close(self) -> None:
        """Leave the view as it was. Not used after that."""
        return None

    @property
    def replayed_steps(self) -> int:
        """How many steps were started as a captured whole."""
        return 0

    @property
    def capture_problem(self) -> str | None:
        """Why steps are not captured (any more); None: they are, or the tier has no use for it."""
        return None

    def breaks(self) -> dict[str, int]:
        """How many modules run as they are between the pieces of captured steps, by class."""
        return {}

    def capture_ahead(self, most_requests: int) -> int:
        """Capture what steps of up to so many requests will need, showing the progress. Returns how many were."""
        return 0

    def refusals(self) -> dict[str, int]:
        """How many modules could have run natively but keep their own forward, by reason."""
        return {}

    def packed_matrices(self) -> list[PackedMatrix]:
        """The packed weights that it computes from."""
        return []


class PackedForward:
    """The view's own forward over the packed tokens of a step, whose attention backend has begun."""

    def __init__(self, view: EngineView, state: ThreadState):
        self._view = view
        self._state = state
        self._slices_logits = view.model._supports_logits_to_keep()

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the tokens `rows`, int64 [S], among token_ids and positions, int64 [T]."""
        arguments = {"logits_to_keep": rows} if self._slices_logits else {}
        with self._state.applied():
            output = self._view.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **arguments
            )
            return output.logits[0] if self._slices_logits else output.logits[0].index_select(0, rows)


class ModuleTier(Tier):
    """The view's own forward, with paged attention in it."""

    name = "modules"

    def __init__(self, view: EngineView, backend: AttentionBackend, state: ThreadState):
        self._backend = backend
        self._device = view.model.device
        self._forward = PackedForward(view, state)

    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        self._backend.begin(batch)
        rows = torch.from_numpy(batch.logit_rows).to(self._device)
        # Models cannot take an empty index; a step that samples nothing keeps one row and drops it below.
        keep = rows if len(rows) else torch.zeros(1, dtype=torch.long, device=self._device)
        token_ids, positions = (
            torch.from_numpy(array).to(self._device) for array in (batch.token_ids, batch.positions)
        )
        logits = self._forward(token_ids, positions, keep)
        return StepOutput(logits[: len(rows)], None)

    def on_weights_changed(self) -> None:
        """Nothing: the view shares the live weights."""


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

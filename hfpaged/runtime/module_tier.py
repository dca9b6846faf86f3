"""ModuleTier: a step by the model's own module code, with paged attention in it."""

from __future__ import annotations

import torch

from hfpaged.runtime.attention.interface import AttentionBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier import StepOutput, Tier
from hfpaged.runtime.view import EngineView


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

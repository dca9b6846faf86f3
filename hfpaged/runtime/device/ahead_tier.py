"""AheadTier: the model's own forward on a device that works behind the host."""

from __future__ import annotations

import torch
from transformers.utils import logging

from hfpaged.fusion.registry import FusionRegistry
from hfpaged.runtime.attention.interface import AheadBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.captured_steps import CapturedSteps, StepWork
from hfpaged.runtime.device.draw_launch import choose_draw
from hfpaged.runtime.device.draws import Drawer, StepTensors
from hfpaged.runtime.device.fused_forwards import FusedForwards
from hfpaged.runtime.device.inputs import InputWriter, StepInputs
from hfpaged.runtime.device.pieces import PieceRecorder
from hfpaged.runtime.module_tier import PackedForward
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier import StepOutput, Tier
from hfpaged.runtime.view import EngineView


class AheadTier(Tier):
    """Queues a step without waiting for the one before: the tokens that it drew are read on the device.

    The positions and slots of a step do not depend on what the step before draws, so the host writes them.

    Args:
        padding_block: a block of the pool that no request has.
        most_drawn: how many tokens of one step the next may read.
        fusions: admits fused operations; None: there are none.
    """

    name = "modules"

    def __init__(
        self,
        view: EngineView,
        backend: AheadBackend,
        state: ThreadState,
        padding_block: int,
        most_drawn: int,
        fusions: FusionRegistry | None,
    ):
        self._view = view
        self._backend = backend
        self._packed = PackedForward(view, state)
        # Under autocast the modules compute in other dtypes than their weights have.
        fuses = fusions is not None and state.autocast_dtype is None
        self._fused = FusedForwards(view, backend.dtype, fusions) if fuses else None
        self._accelerator = backend.accelerator
        self._writer = InputWriter(self._accelerator)
        self._drawn_by = choose_draw(self._accelerator.device, backend.dtype)
        self._drawer = Drawer(self._accelerator, self._drawn_by.function)
        self._drawn = torch.zeros(most_drawn, dtype=torch.int64, device=self._accelerator.device)
        self._replayed_steps = 0
        recorder = PieceRecorder(self._accelerator, view.model, view.step.layers, state.applied)
        work = StepWork(recorder, self._forward, self._weights)
        self.captured = CapturedSteps(self._accelerator, backend, work, self._drawer, padding_block)

    def run(self, batch: StepBatch, want_logits: bool) -> StepOutput:
        """See `Tier.run`. The output is on the device, may not be there yet, and holds until the next run."""
        with self._accelerator.active(), torch.no_grad():
            found = self.captured.run(batch)
            if found is None:
                found = self._run_uncaptured(batch)
            else:
                self._replayed_steps += 1
            rows = len(batch.logit_rows)
            return StepOutput(found.logits[:rows], found.argmax[:rows], found.drawn)

    def capture_ahead(self, most_requests: int) -> int:
        """See `Tier.capture_ahead`."""
        before = len(self.captured.sizes)
        with self._accelerator.active():
            for batch in logging.tqdm(list(self.captured.missing(most_requests)), desc="capturing steps", leave=False):
                # The first step of a size is not captured, and what was once captured is not started here for nothing.
                if self.captured.problem is None and self.captured.run(batch) is None:
                    self._run_uncaptured(batch)
                    self.captured.run(batch)
        return len(self.captured.sizes) - before

    def feed_back(self, drawn: torch.Tensor) -> None:
        """Keep the tokens that the step drew, int64 [n] on the device, for the next one."""
        self._drawn[: len(drawn)].copy_(drawn)

    @property
    def replayed_steps(self) -> int:
        """See `Tier.replayed_steps`."""
        return self._replayed_steps

    @property
    def capture_problem(self) -> str | None:
        """See `Tier.capture_problem`."""
        return self.captured.problem

    def breaks(self) -> dict[str, int]:
        """See `Tier.breaks`."""
        return dict(self.captured.breaks)

    def refusals(self) -> dict[str, int]:
        """See `Tier.refusals`."""
        found = {} if self._fused is None else dict(self._fused.refusals)
        return found if self._drawn_by.problem is None else {**found, f"draws: {self._drawn_by.problem}": 1}

    def close(self) -> None:
        """See `Tier.close`. The collector may take its time to find this object, which is in a cycle."""
        if self._fused is not None:
            self._fused.remove()

    def on_weights_changed(self) -> None:
        """Captured steps read the memory that the weights were in."""
        self.captured.on_weights_changed()

    def _run_uncaptured(self, batch: StepBatch) -> StepTensors:
        inputs = self._writer.write(batch)
        self._backend.begin_ahead(batch, inputs.slots)
        found = self._forward(inputs)
        return found._replace(drawn=self._drawer.draw(batch.draws, found))

    def _forward(self, inputs: StepInputs) -> StepTensors:
        """The part of a step that is the same whether its rows sample or not."""
        # A draw that failed is -1: its request ends as soon as the host sees it, and until then any token will do.
        drawn = self._drawn.index_select(0, inputs.feedback.clamp_min(0)).clamp_min(0)
        token_ids = torch.where(inputs.feedback >= 0, drawn, inputs.token_ids)
        logits = self._packed(token_ids, inputs.positions, inputs.logit_rows)
        scores = logits.to(torch.float32) if logits.dtype is torch.float64 else logits
        argmax = scores.argmax(dim=-1)
        return StepTensors(logits, argmax, argmax.index_select(0, inputs.draw_rows))

    def _weights(self) -> list[torch.Tensor]:
        return [*self._view.model.parameters(), *self._view.model.buffers()]

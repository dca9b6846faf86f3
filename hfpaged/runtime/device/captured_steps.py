"""CapturedSteps: whole steps recorded once and then started at once, instead of kernel by kernel.

A step is captured for a few sizes; a batch is padded to the next of them. The embedding to the token is in it; planning
attention is not, it comes before every replay. Drawing other tokens than the likeliest is a piece of its own behind the
rest, which steps leave out whose rows are all greedy; what each row asks for is written where it reads it, so that it
serves every mixture. Steps that verify guesses are captured like all others, because a request with k guesses is k + 1
requests of one token in the same blocks, each with a draw of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hfpaged.runtime.attention.interface import AheadBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.draws import Drawer, StepTensors
from hfpaged.runtime.device.inputs import InputWriter, StepInputs, padded, padding_batch, single_tokens
from hfpaged.runtime.device.pieces import CapturedWork, PieceRecorder
from hfpaged.sampling.draw_table import DrawTable

logger = logging.getLogger(__name__)

_ROWS_OF_INPUTS = len(StepInputs._fields)
# Each size has memory of its own, and a batch is padded by an eighth at most once it has some size.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
SHARE_OF_FREE_MEMORY = 0.1


class StepWork(NamedTuple):
    """What is captured.

    Attributes:
        recorder: records it, in one piece or in several.
        forward: a step up to its likeliest tokens.
        weights: what that reads beside its inputs; kept as long as a step that reads it.
    """

    recorder: PieceRecorder
    forward: Callable[[StepInputs], StepTensors]
    weights: Callable[[], list[torch.Tensor]]


@dataclass
class _Slot:
    """A captured step and the memory that it reads.

    Attributes:
        draws: the piece that draws, once one was needed.
        numbers: what that reads of the rows.
    """

    captured: CapturedWork
    inputs: torch.Tensor
    numbers: torch.Tensor
    draws: CapturedWork | None = None


class CapturedSteps:
    """Owns all memory that captured steps read and write.

    Args:
        work: what is captured.
        drawer: draws what is not captured.
        padding_block: a block of the pool that no request has.

    Attributes:
        problem: why nothing is captured any more; None: all is well.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        backend: AheadBackend,
        work: StepWork,
        drawer: Drawer,
        padding_block: int,
    ):
        self.problem: str | None = None
        self._accelerator = accelerator
        self._backend = backend
        self._work = work
        self._drawer = drawer
        self._writer = InputWriter(accelerator)
        self._forbidden: str | None = None
        self._held: list[torch.Tensor] = []
        self._padding_block = padding_block
        self._slots: dict[int, _Slot] = {}
        self._seen: set[int] = set()
        self._memory_left: int | None = None

    @property
    def sizes(self) -> list[int]:
        """Sizes that have been captured."""
        return sorted(self._slots)

    @property
    def breaks(self) -> dict[str, int]:
        """How many modules run uncaptured between the pieces of each captured step, by class."""
        return self._work.recorder.breaks

    def run(self, batch: StepBatch) -> StepTensors | None:
        """Run a batch at the next size, draws included.

        Returns:
            Its T rows and N draws, overwritten by the next run of this size; None: the batch has to run as it is.
        """
        if len(batch.logit_rows) != len(batch.token_ids):
            return None
        batch = single_tokens(batch)
        size = None if batch is None else self._size_for(batch)
        if size is None:
            return None
        count = len(batch.token_ids)
        slot = self._start(padded(batch, size, self._padding_block), size)
        if slot is None:
            return None
        logits, argmax, drawn = slot.captured.outputs
        if len(batch.draws.sampled):
            drawn = self._draw(batch.draws, slot)
        return StepTensors(logits[:count], argmax[:count], drawn[: len(batch.draws.logit_rows)])

    def missing(self, most_requests: int) -> Iterator[StepBatch]:
        """A batch for each size that has not been captured yet and that so many requests may need.

        The largest comes first: the smaller ones then fit into the memory that it has used and left.
        """
        largest = next((size for size in _SIZES if size >= most_requests), _SIZES[-1])
        for size in reversed(_SIZES):
            if size <= largest and size not in self._slots:
                yield padding_batch(size, self._padding_block, self._backend.block_size)

    def on_weights_changed(self) -> None:
        """Forget what reads weights that are not the model's any more. Those that changed in place still are."""
        present = [tensor.data_ptr() for tensor in self._work.weights()]
        if self._slots and present != [tensor.data_ptr() for tensor in self._held]:
            self.forget()

    def forget(self) -> None:
        """Forget all captured steps; they will be captured anew."""
        self._slots.clear()
        self._held = []
        self.problem = self._forbidden

    def forbid(self, reason: str) -> None:
        """Capture nothing: the step does more than its inputs say."""
        self.problem = self._forbidden = reason

    def _size_for(self, batch: StepBatch) -> int | None:
        """The size to pad a batch of one token a request to; None: it runs as it is.

        The first step of each size runs as it is as well: it compiles and loads what a capture cannot.
        """
        size = next((size for size in _SIZES if size >= len(batch.token_ids)), None)
        if size is None or not self._backend.can_capture(batch, size) or not batch.draws.can_be_by_row(size):
            return None
        if size in self._slots:
            return size
        is_new = size not in self._seen
        self._seen.add(size)
        return None if is_new or self.problem is not None else size

    def _start(self, batch: StepBatch, size: int) -> _Slot | None:
        """Replay, or capture, the step for a batch of this size; None: it cannot be captured."""
        slot = self._slots.get(size)
        if slot is not None:
            inputs = self._writer.write(batch, slot.inputs)
            self._backend.begin_ahead(batch, inputs.slots, size)
            slot.captured.replay()
            return slot
        free = self._accelerator.free_memory()
        memory = torch.zeros(_ROWS_OF_INPUTS * size, dtype=torch.int64, device=self._accelerator.device)
        inputs = self._writer.write(batch, memory)
        self._backend.begin_ahead(batch, inputs.slots, size)
        try:
            captured = self._work.recorder.run(lambda: self._work.forward(inputs))
        except Exception as error:  # a model may do anything, and the uncaptured step does it too
            self._note_problem("the step", error)
            return None
        self._count_memory(free)
        logger.info("hfpaged captured a step of %d tokens", size)
        self._held = self._held or self._work.weights()
        self._slots[size] = slot = _Slot(captured, memory, self._drawer.memory(size))
        return slot

    def _draw(self, table: DrawTable, slot: _Slot) -> torch.Tensor:
        """The draws of a step that has been started, int64 [N or more]."""
        if slot.draws is None and self.problem is not None:
            return self._drawer.draw(table, slot.captured.outputs)
        self._drawer.write(table, slot.numbers)
        if slot.draws is not None:
            slot.draws.replay()
            return slot.draws.outputs
        found, draw_rows = slot.captured.outputs, slot.inputs.view(_ROWS_OF_INPUTS, -1)[-1]
        # Once as it is: that loads what a recording cannot.
        drawn = self._drawer.draw_by_row(found, draw_rows, slot.numbers)
        free = self._accelerator.free_memory()
        try:
            slot.draws = self._work.recorder.run(lambda: self._drawer.draw_by_row(found, draw_rows, slot.numbers))
        except Exception as error:  # drawn it is all the same
            self._note_problem("the draw", error)
        self._count_memory(free)
        return drawn

    def _note_problem(self, what: str, error: Exception) -> None:
        first_line = next(iter(str(error).splitlines()), "")
        self.problem = f"{what} cannot be captured ({type(error).__name__}: {first_line})"
        logger.warning("hfpaged: %s; every kernel is launched by itself", self.problem)

    def _count_memory(self, free_before: int) -> None:
        if self._memory_left is None:
            self._memory_left = int(free_before * SHARE_OF_FREE_MEMORY)
        self._memory_left -= max(0, free_before - self._accelerator.free_memory())
        if self._memory_left <= 0:
            self.problem = "the memory for captured steps is used up"

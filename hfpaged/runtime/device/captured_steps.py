"""CapturedSteps: whole steps recorded once and then started at once, instead of kernel by kernel.

A step is captured for a few sizes; a batch is padded to the next of them. The embedding to the likeliest token is in
it; planning attention is not, it comes before every replay. Steps that verify guesses are captured like all others,
because a request with k guesses is k + 1 requests of one token in the same blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hfpaged.runtime.attention.interface import AheadBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.inputs import InputWriter, StepInputs, padded, padding_batch, single_tokens
from hfpaged.runtime.device.pieces import CapturedWork, PieceRecorder

logger = logging.getLogger(__name__)

Forward = Callable[[StepInputs], tuple[torch.Tensor, torch.Tensor]]

_ROWS_OF_INPUTS = len(StepInputs._fields)
# Each size has memory of its own, and a batch is padded by an eighth at most once it has some size.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
SHARE_OF_FREE_MEMORY = 0.1


class _Slot(NamedTuple):
    """A captured step and the memory that it reads."""

    captured: CapturedWork
    inputs: torch.Tensor


class CapturedSteps:
    """Owns all memory that captured steps read and write.

    Args:
        recorder: records `forward`, in one piece or in several.
        forward: what is captured.
        weights: what it reads beside its inputs; kept as long as a step that reads it.
        padding_block: a block of the pool that no request has.

    Attributes:
        problem: why nothing is captured any more; None: all is well.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        backend: AheadBackend,
        recorder: PieceRecorder,
        forward: Forward,
        weights: Callable[[], list[torch.Tensor]],
        padding_block: int,
    ):
        self.problem: str | None = None
        self._accelerator = accelerator
        self._backend = backend
        self._recorder = recorder
        self._writer = InputWriter(accelerator)
        self._forward = forward
        self._weights = weights
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
        return self._recorder.breaks

    def run(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a batch at the next size.

        Returns:
            (logits [T, V], their argmax int64 [T]), overwritten by the next run of this size; None: the batch has to
            run as it is.
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
        logits, argmax = slot.captured.outputs
        return logits[:count], argmax[:count]

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
        present = [tensor.data_ptr() for tensor in self._weights()]
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
        if size is None or not self._backend.can_capture(batch, size):
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
            captured = self._recorder.run(lambda: self._forward(inputs))
        except Exception as error:  # a model may do anything, and the uncaptured step does it too
            first_line = next(iter(str(error).splitlines()), "")
            self.problem = f"the step cannot be captured ({type(error).__name__}: {first_line})"
            logger.warning("hfpaged: %s; every kernel is launched by itself", self.problem)
            return None
        self._count_memory(free)
        logger.info("hfpaged captured a step of %d tokens", size)
        self._held = self._held or self._weights()
        self._slots[size] = slot = _Slot(captured, memory)
        return slot

    def _count_memory(self, free_before: int) -> None:
        if self._memory_left is None:
            self._memory_left = int(free_before * SHARE_OF_FREE_MEMORY)
        self._memory_left -= max(0, free_before - self._accelerator.free_memory())
        if self._memory_left <= 0:
            self.problem = "the memory for captured steps is used up"

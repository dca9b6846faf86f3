"""CapturedSteps: whole steps recorded once and then started at once, instead of kernel by kernel.

A step is captured for a few sizes; a batch of one token for each of its requests is padded to the next of them. The
embedding to the likeliest token is in it; planning attention is not, it comes before every replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hfpaged.runtime.attention.interface import AheadBackend
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.accelerator import Accelerator, Captured
from hfpaged.runtime.device.inputs import InputWriter, StepInputs, padded

logger = logging.getLogger(__name__)

Forward = Callable[[StepInputs], tuple[torch.Tensor, torch.Tensor]]

_ROWS_OF_INPUTS = len(StepInputs._fields)
# Each size has memory of its own, and a batch is padded by an eighth at most once it has some size.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
SHARE_OF_FREE_MEMORY = 0.1


class _Slot(NamedTuple):
    """A captured step and the memory that it reads."""

    captured: Captured
    inputs: torch.Tensor


class CapturedSteps:
    """Owns all memory that captured steps read and write.

    Args:
        forward: what is captured.
        weights: what it reads beside its inputs; kept as long as a step that reads it.
        padding_block: a block of the pool that no request has.

    Attributes:
        problem: why nothing is captured any more; None: all is well.
        replays: how many steps were started this way.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        backend: AheadBackend,
        writer: InputWriter,
        forward: Forward,
        weights: Callable[[], list[torch.Tensor]],
        padding_block: int,
    ):
        self.problem: str | None = None
        self.replays = 0
        self._accelerator = accelerator
        self._backend = backend
        self._writer = writer
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

    def size_for(self, batch: StepBatch) -> int | None:
        """The size to pad a batch to; None: it runs as it is.

        The first step of each size runs as it is as well: it compiles and loads what a capture cannot.
        """
        count = len(batch.context_len)
        if int(batch.query_start[-1]) != count or len(batch.logit_rows) != count:
            return None
        size = next((size for size in _SIZES if size >= count), None)
        if size is None or not self._backend.can_capture(batch, size):
            return None
        if size in self._slots:
            return size
        is_new = size not in self._seen
        self._seen.add(size)
        return None if is_new or self.problem is not None else size

    def run(self, batch: StepBatch, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a batch at the size that was found for it.

        Returns:
            (logits [R, V], their argmax int64 [R]), overwritten by the next run of this size; None if it could not be
            captured.
        """
        count = len(batch.context_len)
        batch = padded(batch, size, self._padding_block)
        slot = self._slots.get(size)
        if slot is None:
            memory = torch.zeros(_ROWS_OF_INPUTS * size, dtype=torch.int64, device=self._accelerator.device)
        else:
            memory = slot.inputs
        inputs = self._writer.write(batch, memory)
        self._backend.begin_ahead(batch, inputs.slots, size)
        if slot is None:
            slot = self._capture(size, memory, inputs)
            if slot is None:
                return None
        slot.captured.replay()
        self.replays += 1
        logits, argmax = slot.captured.outputs
        return logits[:count], argmax[:count]

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

    def _capture(self, size: int, memory: torch.Tensor, inputs: StepInputs) -> _Slot | None:
        before = self._accelerator.free_memory()
        if self._memory_left is None:
            self._memory_left = int(before * SHARE_OF_FREE_MEMORY)
        try:
            captured = self._accelerator.capture(lambda: self._forward(inputs))
        except Exception as error:  # a model may do anything, and the uncaptured step does it too
            first_line = next(iter(str(error).splitlines()), "")
            self.problem = f"the step cannot be captured ({type(error).__name__}: {first_line})"
            logger.warning("hfpaged: %s; every kernel is launched by itself", self.problem)
            return None
        self._memory_left -= max(0, before - self._accelerator.free_memory())
        if self._memory_left <= 0:
            self.problem = "the memory for captured steps is used up"
        logger.info("hfpaged captured a step of %d requests", size)
        self._held = self._held or self._weights()
        self._slots[size] = slot = _Slot(captured, memory)
        return slot

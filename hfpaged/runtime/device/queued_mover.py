"""QueuedMover: blocks that a device moves behind the host, in the order of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hfpaged.runtime.block_mover import BlockContent, BlockMover
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.staging import PinnedRing


class QueuedMover(BlockMover):
    """Neither the host nor the steps wait for what goes out: it is gathered first, so that its blocks can be reused.

    What comes back is waited for by the step that needs it, on the device.
    """

    def __init__(self, accelerator: Accelerator, tensors: Sequence[torch.Tensor]):
        self._accelerator = accelerator
        self._tensors = tensors
        self._ids = PinnedRing(accelerator, torch.int64)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `BlockMover.copy`."""
        with torch.no_grad(), self._accelerator.active():
            sources, destinations = self._ids.upload(tuple(np.array(pairs, dtype=np.int64).T))
            for tensor in self._tensors:
                tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def read(self, blocks: Sequence[int]) -> BlockContent:
        """See `BlockMover.read`."""
        with torch.no_grad(), self._accelerator.active():
            (ids,) = self._ids.upload((np.array(blocks, dtype=np.int64),))
            return [self._accelerator.move_out(tensor.index_select(0, ids)) for tensor in self._tensors]

    def write(self, blocks: Sequence[int], content: BlockContent) -> None:
        """See `BlockMover.write`."""
        with torch.no_grad(), self._accelerator.active():
            (ids,) = self._ids.upload((np.array(blocks, dtype=np.int64),))
            for tensor, saved in zip(self._tensors, content, strict=True):
                tensor.index_copy_(0, ids, self._accelerator.move_in(saved[: len(blocks)]))

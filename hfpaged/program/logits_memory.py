"""LogitsMemory: memory for the logits of one step after the other.

The logits of 64 rows over 49,152 tokens are 12 MiB. An allocator gives a block of that size back to the system and
takes it anew, and the first write to each of its pages costs several times what a later one does. So a block is used
again as soon as the last tensor over it is gone.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

MOST_KEPT = 2
# What is larger belongs to a rare step, such as one that scores prompts.
MOST_BYTES_KEPT = 128 << 20


class LogitsMemory:
    """Blocks that are taken by one thread and given back by any."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, *shape: int) -> torch.Tensor:
        """fp32 tensor, not initialized. Its memory is used again when nothing refers to it, or to a view of it."""
        size = prod(shape)
        block = self._free.pop() if self._free else None
        if block is None or block.size < size:
            block = np.empty(size, dtype=np.float32)
        # PyTorch keeps this very object as long as the storage of the tensor lives.
        array = block[:size].reshape(shape)
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array)

    def _give_back(self, block: np.ndarray) -> None:
        if len(self._free) < MOST_KEPT and block.nbytes <= MOST_BYTES_KEPT:
            self._free.append(block)

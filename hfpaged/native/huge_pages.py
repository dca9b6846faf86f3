"""Host memory on huge pages, where the system has any: what a step reads from end to end costs fewer translations."""

from __future__ import annotations

import numpy as np
import torch

HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64


def zeroed(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], aligned to a huge page. The operating system commits a page when it is first written.

    torch.zeros writes every page; numpy's zeros come from calloc, on huge pages where there are any.
    """
    memory = np.zeros(num_bytes + HUGE_PAGE_BYTES, dtype=np.uint8)
    first = -memory.__array_interface__["data"][0] % HUGE_PAGE_BYTES
    return torch.from_numpy(memory[first : first + num_bytes])


class Arena:
    """Tensors that live as long as each other, side by side.

    Args:
        block_bytes: taken from the system at a time. A tensor that is larger gets memory of its own.
    """

    def __init__(self, block_bytes: int = 16 * HUGE_PAGE_BYTES):
        self._block_bytes = block_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor on the CPU."""
        num_bytes = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._free):
            self._free = zeroed(max(num_bytes, self._block_bytes))
        taken, self._free = self._free.split([num_bytes, len(self._free) - num_bytes])
        return taken[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

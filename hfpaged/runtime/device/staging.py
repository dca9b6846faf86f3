"""PinnedRing: page-locked memory in which the host lays out what a step copies to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hfpaged.runtime.device.accelerator import Accelerator, Mark

_SMALLEST = 256
_DEPTH = 2


class PinnedRing:
    """Buffers of one dtype in turn: while the device copies out of one, the host fills the next.

    Everything that reads what `fill` returned must have been queued before the next `fill`.
    """

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype):
        self._accelerator = accelerator
        self._dtype = dtype
        self._buffers = [accelerator.pinned(_SMALLEST, dtype) for _ in range(_DEPTH)]
        self._marks: list[Mark | None] = [None] * _DEPTH
        self._current = 0

    def fill(self, parts: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Lay the arrays out one behind the other.

        Returns:
            Host tensors with their contents, views of one piece of page-locked memory, in order.
        """
        sizes = [part.size for part in parts]
        buffer = self._next(sum(sizes))
        target, first = buffer.numpy(), 0
        for part, size in zip(parts, sizes, strict=True):
            target[first : first + size] = part.reshape(-1)
            first += size
        return list(buffer[:first].split(sizes))

    def upload(self, parts: Sequence[np.ndarray], out: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Queue one copy of all the arrays.

        Args:
            out: device memory for them, [size or more]; None: new memory.

        Returns:
            Device tensors with their contents, views of one piece of memory, in order.
        """
        sizes = [part.size for part in parts]
        self.fill(parts)
        host = self._buffers[self._current][: sum(sizes)]
        device = self._accelerator.upload(host, None if out is None else out[: len(host)])
        return list(device.split(sizes))

    def _next(self, size: int) -> torch.Tensor:
        """The other buffer, when the device has read what was in it."""
        self._marks[self._current] = self._accelerator.mark()
        self._current = (self._current + 1) % _DEPTH
        mark = self._marks[self._current]
        if mark is not None:
            mark.synchronize()
        if len(self._buffers[self._current]) < size:
            self._buffers[self._current] = self._accelerator.pinned(2 * size, self._dtype)
        return self._buffers[self._current]

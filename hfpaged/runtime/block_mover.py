"""BlockMover: copies whole KV blocks within the pool, out of it and back. The inside of a block is the backend's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

# Per tensor of the pool, the content of some blocks: [blocks, ...] on the host.
BlockContent = list[torch.Tensor]
# NumPy has no bfloat16 and no 8-bit floats; moving them takes no more than their size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BlockMover(ABC):
    """Moves blocks of the tensors of a pool, each [block, ...]. Used by the stepping thread only."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block contents, (source, destination) each; no destination is another pair's source."""

    @abstractmethod
    def read(self, blocks: Sequence[int]) -> BlockContent:
        """The content of the blocks as it is now, for `write`. It may still be on its way to the host."""

    @abstractmethod
    def write(self, blocks: Sequence[int], content: BlockContent) -> None:
        """Put back the first `len(blocks)` blocks of what `read` returned, bit for bit."""


class DirectMover(BlockMover):
    """Moves blocks at once, on any device."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._on_host = [
            tensor.view(_BITS[tensor.itemsize]).numpy() for tensor in tensors if tensor.device.type == "cpu"
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `BlockMover.copy`."""
        if self._on_host:
            # Small copies, but into no other memory first.
            for array in self._on_host:
                for source, destination in pairs:
                    array[destination] = array[source]
            return
        sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
        for tensor in self._tensors:
            tensor[destinations] = tensor[sources]

    def read(self, blocks: Sequence[int]) -> BlockContent:
        """See `BlockMover.read`."""
        return [tensor[list(blocks)].cpu() for tensor in self._tensors]

    def write(self, blocks: Sequence[int], content: BlockContent) -> None:
        """See `BlockMover.write`."""
        for tensor, saved in zip(self._tensors, content, strict=True):
            tensor[list(blocks)] = saved[: len(blocks)].to(tensor.device)

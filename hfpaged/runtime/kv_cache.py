"""KVCache: the paged keys and values of all layers. One K and one V tensor a layer, leading dimension = block id."""

from __future__ import annotations

import math

import torch

from hfpaged.runtime.attention.interface import AttentionBackend
from hfpaged.runtime.step import LayerKV, SeenLayer

BlockContent = list[torch.Tensor]
# NumPy has no bfloat16 and no 8-bit floats; moving them takes no more than their size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KVCache:
    """Allocates the pool and moves whole blocks. Blocks are opaque here: their inside is the backend's layout.

    Args:
        backend: decides layout and device placement of each layer's tensors.
        seen: the attention layers in the order they run, from the probing forward.
        num_blocks: blocks of the pool; every layer has the same ids.
        spare_blocks: blocks behind those that are never in the pool.
    """

    def __init__(self, backend: AttentionBackend, seen: list[SeenLayer], num_blocks: int, spare_blocks: int = 0):
        self.num_blocks = num_blocks
        self.layers = [LayerKV(*backend.allocate(layer.shape, num_blocks + spare_blocks)) for layer in seen]
        self._on_host = [
            tensor.view(_BITS[tensor.itemsize]).numpy() for tensor in self._tensors() if tensor.device.type == "cpu"
        ]

    @staticmethod
    def bytes_per_block(backend: AttentionBackend, seen: list[SeenLayer]) -> int:
        """Bytes that one block takes over all layers."""
        stored = [backend.stored_shape(layer.shape) for layer in seen]
        per_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in stored)
        return per_token * backend.dtype.itemsize * backend.block_size

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy block contents, (source, destination) each; no destination is another pair's source."""
        if self._on_host:
            # Small copies, but into no other memory first.
            for array in self._on_host:
                for source, destination in pairs:
                    array[destination] = array[source]
            return
        sources, destinations = (list(ids) for ids in zip(*pairs, strict=True))
        for tensor in self._tensors():
            tensor[destinations] = tensor[sources]

    def read(self, blocks: tuple[int, ...]) -> BlockContent:
        """Content of the blocks as host tensors, K and V of each layer in turn, each [len(blocks), ...]."""
        return [tensor[list(blocks)].cpu() for tensor in self._tensors()]

    def write(self, blocks: tuple[int, ...], content: BlockContent) -> None:
        """Put back the first `len(blocks)` blocks of what `read` returned, bit for bit."""
        for tensor, saved in zip(self._tensors(), content, strict=True):
            tensor[list(blocks)] = saved[: len(blocks)].to(tensor.device)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.key, layer.value)]


def content_bytes(content: BlockContent) -> int:
    """Size in bytes of what `KVCache.read` returned."""
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in content)

"""KVCache: the paged keys and values of all layers. One K and one V tensor a layer, leading dimension = block id."""

from __future__ import annotations

from hfpaged.runtime.attention.interface import AheadBackend, AttentionBackend
from hfpaged.runtime.block_mover import BlockMover, DirectMover
from hfpaged.runtime.device.queued_mover import QueuedMover
from hfpaged.runtime.paged_attention import LayerKV, SeenLayer


class KVCache:
    """Allocates the pool. Blocks are opaque here: their inside is the backend's layout.

    Args:
        backend: decides layout and device placement of each layer's tensors.
        seen: the attention layers in the order they run, from the probing forward.
        num_blocks: blocks of the pool; every layer has the same ids.
        spare_blocks: blocks behind those that are never in the pool.

    Attributes:
        mover: moves whole blocks; their content is K and V of each layer in turn.
    """

    def __init__(self, backend: AttentionBackend, seen: list[SeenLayer], num_blocks: int, spare_blocks: int = 0):
        self.num_blocks = num_blocks
        self.layers = [LayerKV(*backend.allocate(layer.shape, num_blocks + spare_blocks)) for layer in seen]
        tensors = [tensor for layer in self.layers for tensor in (layer.key, layer.value)]
        self.mover: BlockMover = (
            QueuedMover(backend.accelerator, tensors) if isinstance(backend, AheadBackend) else DirectMover(tensors)
        )

    @staticmethod
    def bytes_per_block(backend: AttentionBackend, seen: list[SeenLayer]) -> int:
        """Bytes that one block takes over all layers."""
        stored = [backend.stored_shape(layer.shape) for layer in seen]
        per_token = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in stored)
        return per_token * backend.dtype.itemsize * backend.block_size

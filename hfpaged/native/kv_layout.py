"""The tiled layout of paged keys and values (csrc/kv_cache.h) as tensors: a tile's keys, then its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_TOKENS = 16


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's pool.

    Args:
        block_size: a multiple of TILE_TOKENS.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def memory_shape(self) -> tuple[int, int, int, int]:
        """Shape of the tensor that holds both: [blocks, KV heads, tiles, elements of a tile]."""
        elements = TILE_TOKENS * (self.key_dim + self.value_dim)
        return self.num_blocks, self.kv_heads, self.block_size // TILE_TOKENS, elements

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in `memory`, a contiguous tensor of `memory_shape`.

        Returns:
            fp32: key [blocks, heads, tiles, Dk, 16], value [blocks, heads, tiles, 16, Dv];
            16-bit: key [blocks, heads, tiles, Dk / 2, 16, 2], value [blocks, heads, tiles, 8, Dv, 2].
        """
        split = TILE_TOKENS * self.key_dim
        key, value = (self.key_dim, TILE_TOKENS), (TILE_TOKENS, self.value_dim)
        if memory.dtype.itemsize == 2:
            key, value = (self.key_dim // 2, TILE_TOKENS, 2), (TILE_TOKENS // 2, self.value_dim, 2)
        return memory[..., :split].unflatten(-1, key), memory[..., split:].unflatten(-1, value)

    def is_of(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are what `views` returns."""
        if key.data_ptr() + TILE_TOKENS * self.key_dim * key.element_size() != value.data_ptr():
            return False
        *rows, elements = self.memory_shape
        strides = (rows[1] * rows[2] * elements, rows[2] * elements, elements)
        # The stride of a dimension of one element says nothing.
        telling = [dim for dim in range(3) if rows[dim] > 1]
        return all(
            list(tensor.shape[:3]) == rows and all(tensor.stride(dim) == strides[dim] for dim in telling)
            for tensor in (key, value)
        )

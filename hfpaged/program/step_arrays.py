"""StepArrays: the tokens of a step and where they go. As the native struct they are kept alive while it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hfpaged.errors import NativeKernelError
from hfpaged.native.kv_layout import KVLayout
from hfpaged.native.library import Batch
from hfpaged.program.abi import Step
from hfpaged.program.description import Attention

KVPairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class StepArrays:
    """T tokens of R requests, packed one request after the other. All arrays are C-contiguous.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], position of each token in its own request.
        slots: int64 [T], where the token's KV goes: block_id * block_size + offset.
        query_start: int32 [R + 1], first packed token of each request, then T.
        context_len: int32 [R], tokens of the request that attention sees, those of this step included.
        table_rows: int32 [R], the request's row in `block_tables`.
        block_tables: int32 [rows, width]; entries beyond ceil(context_len / block_size) are stale.
        block_size: tokens per block.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    table_rows: np.ndarray
    block_tables: np.ndarray
    block_size: int


class CachePointers:
    """Addresses of the keys and values of some attention layers, checked against the layers once.

    Args:
        kv: (key, value) of each layer, leading dimension = block, in the native layout.
        dtype: that the layers compute in.

    Raises:
        NativeKernelError: a tensor does not hold what its layer writes.
    """

    def __init__(self, kv: KVPairs, layers: Sequence[Attention], dtype: torch.dtype, block_size: int):
        self.kv = kv
        self.block_size = block_size
        self.num_blocks = kv[0][0].shape[0]
        if len(kv) != len(layers):
            raise NativeKernelError(f"there are {len(layers)} attention layers, and the KV cache has {len(kv)}")
        for index, (shape, pair) in enumerate(zip(layers, kv, strict=True)):
            layout = KVLayout(self.num_blocks, block_size, shape.kv_heads, shape.key_dim, shape.value_dim)
            if any(tensor.dtype != dtype for tensor in pair) or not layout.is_of(*pair):
                raise NativeKernelError(f"the KV cache of layer {index} has another dtype or shape than the model")
        self.key, self.value = ((ctypes.c_void_p * len(kv))(*(pair[part].data_ptr() for pair in kv)) for part in (0, 1))

    def serves(self, kv: KVPairs, block_size: int) -> bool:
        """Whether these are the addresses of `kv`, the very same sequence of tensors."""
        return kv is self.kv and block_size == self.block_size


def make_step(batch: StepArrays, cache: CachePointers, sample_rows: np.ndarray) -> Step:
    """A Step over the arrays of `batch`, the cache and the sampled rows.

    The struct keeps its arrays alive. Its operations, threads and outputs are the caller's to set.

    Raises:
        NativeKernelError: an array has another dtype or layout than StepArrays promises.
    """
    step = Step()
    step.keep = (batch, cache, sample_rows)
    step.batch = Batch(
        address_of(batch.query_start, np.int32),
        address_of(batch.context_len, np.int32),
        address_of(batch.table_rows, np.int32),
        address_of(batch.block_tables, np.int32),
        address_of(batch.slots, np.int64),
        batch.block_tables.shape[1],
        len(batch.context_len),
        batch.block_tables.shape[0],
        batch.block_size,
    )
    step.tokens, step.samples = len(batch.token_ids), len(sample_rows)
    step.token_ids = address_of(batch.token_ids, np.int64)
    step.positions = address_of(batch.positions, np.int64)
    step.sample_rows = address_of(sample_rows, np.int64)
    step.key_cache, step.value_cache = ctypes.addressof(cache.key), ctypes.addressof(cache.value)
    step.num_blocks = cache.num_blocks
    return step


def address_of(array: np.ndarray, dtype: type[np.generic]) -> int | None:
    """Address of an array; None of an empty one.

    Raises:
        NativeKernelError: it has another dtype, or is not contiguous.
    """
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise NativeKernelError(f"a {array.dtype} array of the step is not a contiguous {np.dtype(dtype)} one")
    # A third of the time of `array.ctypes.data`, several times in every step.
    return ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.size else None

"""Paged attention on the CPU by the compiled kernels (csrc/attention.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hfpaged.errors import ConfigError
from hfpaged.native import library
from hfpaged.native.kv_layout import TILE_TOKENS, KVLayout
from hfpaged.runtime.attention.interface import (
    AttentionBackend,
    AttentionParams,
    KVTensors,
    LayerShape,
    lazily_zeroed,
)

if TYPE_CHECKING:
    from hfpaged.runtime.batch import StepBatch

MAX_HEAD_DIM = 512
DTYPE_CODES = {getattr(torch, name): code for name, code in library.DTYPE_CODES.items()}


class NativeBackend(AttentionBackend):
    """Reads keys and values in their blocks, all requests of a step in one call, on torch's number of threads.

    Outputs are bit-identical alone, batched, chunked and for any number of threads, on one instruction set.

    Keys and values are views of one tensor, in the layout of `KVLayout`.
    """

    name = "native"
    device_types = frozenset({"cpu"})

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int):
        super().__init__(device, dtype, block_size)
        self._library = library.load()
        self._batch = library.Batch(block_size=block_size)
        self._arrays: StepBatch | None = None
        self._num_threads = 1
        self._calls: dict[int, _LayerCalls] = {}

    @classmethod
    def unavailable(
        cls, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
    ) -> str | None:
        """See `AttentionBackend.unavailable`."""
        if device.type != "cpu":
            return f"the native kernels run on the CPU, the model is on {device}"
        if dtype not in DTYPE_CODES:
            return f"the native kernels know fp32, bf16 and fp16, not {dtype}"
        if block_size < 1 or block_size % TILE_TOKENS:
            return f"the native kernels need a block size that is a multiple of {TILE_TOKENS}, not {block_size}"
        for dim in sorted({dim for shape in shapes for dim in shape[1:]}):
            if dim % 2 or not 2 <= dim <= MAX_HEAD_DIM:
                return f"the native kernels need even head dimensions up to {MAX_HEAD_DIM}, not {dim}"
        return library.unavailable()

    def allocate(self, shape: LayerShape, num_blocks: int) -> KVTensors:
        """See `AttentionBackend.allocate`."""
        layout = KVLayout(num_blocks, self.block_size, *shape)
        # The memory of a cache that was freed may come back with another shape.
        self._calls.clear()
        return layout.views(lazily_zeroed(layout.memory_shape, self.dtype, self.device))

    def begin(self, batch: StepBatch) -> None:
        """See `AttentionBackend.begin`."""
        self.require_same_blocks(batch)
        self._arrays = batch
        for name in ("query_start", "context_len", "table_rows", "block_tables", "slots"):
            setattr(self._batch, name, _address(getattr(batch, name)))
        self._batch.num_requests = len(batch.context_len)
        self._batch.num_table_rows, self._batch.table_stride = batch.block_tables.shape
        self._num_threads = torch.get_num_threads()

    def write(self, kv: KVTensors, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `AttentionBackend.write`."""
        key, value = self._readable(key), self._readable(value)
        call = self._calls_of(kv)
        args = call.write
        args.key, args.value = key.data_ptr(), value.data_ptr()
        args.key_token_stride, args.key_head_stride, _ = key.stride()
        args.value_token_stride, args.value_head_stride, _ = value.stride()
        args.num_threads = self._num_threads
        library.check(self._library.hfp_write_kv(call.write_pointer))

    def run(self, kv: KVTensors, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        query = self._readable(query)
        call = self._calls_of(kv)
        num_tokens, num_heads, _ = query.shape
        output = torch.empty(num_tokens, num_heads, call.cache.value_dim, dtype=self.dtype)
        sinks = None if params.sinks is None else params.sinks.detach().to("cpu", torch.float32).contiguous()
        args = call.attention
        args.query, args.output = query.data_ptr(), output.data_ptr()
        args.query_token_stride, args.query_head_stride, _ = query.stride()
        args.output_token_stride, args.output_head_stride, _ = output.stride()
        args.num_heads = num_heads
        args.scale, args.softcap, args.window = params.scale, params.softcap or 0.0, params.window or 0
        args.sinks = None if sinks is None else sinks.data_ptr()
        args.num_threads = self._num_threads
        library.check(self._library.hfp_attention(call.attention_pointer))
        return output

    def _calls_of(self, kv: KVTensors) -> _LayerCalls:
        address = kv[0].data_ptr()
        calls = self._calls.get(address)
        if calls is None:
            calls = self._calls[address] = _LayerCalls(kv, DTYPE_CODES[self.dtype], self._batch)
        return calls

    def _readable(self, states: torch.Tensor) -> torch.Tensor:
        """`states` in the dtype of the cache, with a contiguous last dimension."""
        if states.dtype is not self.dtype:
            states = states.to(self.dtype)
        return states if states.stride(-1) == 1 else states.contiguous()


class _LayerCalls:
    """The argument structs of one layer, kept from call to call: filling them anew would cost more than small steps."""

    def __init__(self, kv: KVTensors, dtype_code: int, batch: library.Batch):
        key, value = kv
        pack = 1 if dtype_code == library.DTYPE_CODES["float32"] else 2
        self.cache = library.Cache(
            key=key.data_ptr(),
            value=value.data_ptr(),
            dtype=dtype_code,
            num_blocks=key.shape[0],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3] * pack,
            value_dim=value.shape[4],
        )
        shared = {"batch": ctypes.pointer(batch), "cache": ctypes.pointer(self.cache)}
        self.attention = library.AttentionArgs(**shared)
        self.write = library.WriteKvArgs(**shared)
        self.attention_pointer = ctypes.pointer(self.attention)
        self.write_pointer = ctypes.pointer(self.write)


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise ConfigError("the arrays of a batch must be C-contiguous")
    return array.__array_interface__["data"][0]

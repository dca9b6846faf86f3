"""The C entry points refuse arguments that would make them read or write out of bounds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hfpaged.errors import NativeKernelError
from hfpaged.native import library

INT32_MAX = 2**31 - 1


class Call:
    """Valid arguments for two requests of 1 and 3 tokens in a cache of 4 blocks; tests break one at a time."""

    def __init__(self) -> None:
        self.arrays = {
            "query_start": np.array([0, 1, 4], dtype=np.int32),
            "context_len": np.array([20, 3], dtype=np.int32),
            "table_rows": np.array([1, 0], dtype=np.int32),
            "block_tables": np.array([[3, 99], [0, 2]], dtype=np.int32),
            "slots": np.array([35, 48, 49, 50], dtype=np.int64),
        }
        self.memory = np.zeros(4 * 16 * (8 + 8), dtype=np.float32)
        address = self.memory.ctypes.data
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.batch = library.Batch(table_stride=2, num_requests=2, num_table_rows=2, block_size=16, **pointers)
        values = address + 16 * 8 * self.memory.itemsize  # behind the keys of the first tile
        self.cache = library.Cache(address, values, 0, 4, 1, 8, 8)
        shared = {"batch": ctypes.pointer(self.batch), "cache": ctypes.pointer(self.cache), "num_threads": 1}
        self.output = np.zeros((4, 2, 8), dtype=np.float32)
        self.attention = library.AttentionArgs(
            query=address, output=self.output.ctypes.data, num_heads=2, scale=1.0,
            output_token_stride=16, output_head_stride=8, **shared,
        )  # fmt: skip
        self.write = library.WriteKvArgs(key=address, value=address, **shared)


@pytest.fixture
def call():
    return Call()


def test_valid_arguments_pass(kernels, call):
    assert kernels.hfp_attention(call.attention) == 0
    assert kernels.hfp_write_kv(call.write) == 0


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("cache", "dtype", 3, "dtype"),
        ("cache", "dtype", -1, "dtype"),
        ("cache", "key_dim", 7, "even"),
        ("cache", "value_dim", 514, "512"),
        ("cache", "num_kv_heads", 0, "heads"),
        ("cache", "key", None, "null"),
        ("batch", "block_size", 8, "multiple of 16"),
        ("batch", "block_size", 0, "multiple of 16"),
        ("batch", "num_requests", -1, "query_start"),
        ("batch", "query_start", None, "null"),
        ("batch", "block_tables", None, "null"),
        ("batch", "num_table_rows", 1, "block table"),
        ("batch", "table_stride", 1, "block table"),
        ("cache", "num_blocks", 3, "block table"),
        ("attention", "num_heads", 0, "heads"),
        ("attention", "query", None, "null"),
        ("attention", "output", None, "null"),
        ("attention", "window", -1, "window"),
        ("attention", "softcap", float("nan"), "softcap"),
        ("attention", "num_threads", 0, "num_threads"),
        ("attention", "num_threads", 5000, "num_threads"),
    ],
)
def test_attention_refuses(kernels, call, part, field, value, message):
    setattr(getattr(call, part), field, value)
    with pytest.raises(NativeKernelError, match=message):
        library.check(kernels.hfp_attention(call.attention))
    assert not call.output.any()


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("query_start", 0, 1, "query_start"),
        ("query_start", 1, 5, "query_start"),
        ("context_len", 1, 2, "context"),
        ("context_len", 0, INT32_MAX, "block table"),
        ("table_rows", 0, 2, "block table"),
        ("table_rows", 0, -1, "block table"),
        ("block_tables", (1, 1), 4, "block table"),
        ("block_tables", (1, 0), -1, "block table"),
    ],
)
def test_attention_refuses_a_batch(kernels, call, array, index, value, message):
    call.arrays[array][index] = value
    with pytest.raises(NativeKernelError, match=message):
        library.check(kernels.hfp_attention(call.attention))


def test_query_heads_must_be_a_multiple_of_kv_heads(kernels, call):
    call.cache.num_kv_heads, call.attention.num_heads = 2, 3
    with pytest.raises(NativeKernelError, match="multiple"):
        library.check(kernels.hfp_attention(call.attention))


@pytest.mark.parametrize("slot", [-1, 64])
def test_write_refuses_slots_outside_the_cache(kernels, call, slot):
    call.arrays["slots"][2] = slot
    with pytest.raises(NativeKernelError, match="slot"):
        library.check(kernels.hfp_write_kv(call.write))


def test_null_arguments_are_refused(kernels):
    with pytest.raises(NativeKernelError, match="null"):
        library.check(kernels.hfp_attention(None))
    with pytest.raises(NativeKernelError, match="null"):
        library.check(kernels.hfp_write_kv(None))


def test_empty_batches_do_nothing(kernels, call):
    call.batch.num_requests = 0
    assert kernels.hfp_attention(call.attention) == 0
    assert kernels.hfp_write_kv(call.write) == 0
    assert not call.output.any()

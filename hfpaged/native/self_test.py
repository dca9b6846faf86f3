"""A small attention problem with a known answer, for platforms on which the kernels were never tested."""

from __future__ import annotations

import ctypes
import math

from hfpaged.native import library

TOKENS, HEADS, DIM, BLOCK_SIZE = 20, 2, 4, 16


def failure(kernels: ctypes.CDLL) -> str | None:
    """Attend with the last of 20 fp32 tokens over two blocks. Returns what went wrong, or None."""
    query = [math.sin(i) for i in range(HEADS * DIM)]
    key = [math.cos(0.3 * i) for i in range(TOKENS * DIM)]
    value = [math.sin(0.7 * i) for i in range(TOKENS * DIM)]
    try:
        output = _attend(kernels, query, key, value)
    except library.NativeKernelError as error:
        return str(error)
    expected = [x for head in range(HEADS) for x in _expected(query[head * DIM : (head + 1) * DIM], key, value)]
    worst = max(abs(a - b) for a, b in zip(output, expected, strict=True))
    return None if worst < 1e-5 else f"attention is off by {worst:.1e}"


def _attend(kernels: ctypes.CDLL, query: list[float], key: list[float], value: list[float]) -> list[float]:
    numbers = {
        "query": _floats(query),
        "key": _floats(key),
        "value": _floats(value),
        "cache": _floats([0.0] * (2 * BLOCK_SIZE * 2 * DIM)),
        "output": _floats([0.0] * (HEADS * DIM)),
    }
    address = {name: ctypes.addressof(array) for name, array in numbers.items()}
    values = address["cache"] + ctypes.sizeof(ctypes.c_float) * BLOCK_SIZE * DIM
    cache = library.Cache(address["cache"], values, 0, 2, 1, DIM, DIM)
    # The blocks in reverse order: block 1, then block 0.
    slots = (ctypes.c_int64 * TOKENS)(*((1 - i // BLOCK_SIZE) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(TOKENS)))
    ints = {
        "all": (ctypes.c_int32 * 2)(0, TOKENS),
        "last": (ctypes.c_int32 * 2)(0, 1),
        "context_len": (ctypes.c_int32 * 1)(TOKENS),
        "table_rows": (ctypes.c_int32 * 1)(0),
        "table": (ctypes.c_int32 * 2)(1, 0),
    }
    batch = library.Batch(
        query_start=ctypes.addressof(ints["all"]),
        context_len=ctypes.addressof(ints["context_len"]),
        table_rows=ctypes.addressof(ints["table_rows"]),
        block_tables=ctypes.addressof(ints["table"]),
        slots=ctypes.addressof(slots),
        table_stride=2,
        num_requests=1,
        num_table_rows=1,
        block_size=BLOCK_SIZE,
    )
    shared = {"batch": ctypes.pointer(batch), "cache": ctypes.pointer(cache), "num_threads": 1}
    write = library.WriteKvArgs(
        key=address["key"], value=address["value"], key_token_stride=DIM, value_token_stride=DIM, **shared
    )
    attention = library.AttentionArgs(
        query=address["query"], output=address["output"], query_head_stride=DIM, output_head_stride=DIM,
        num_heads=HEADS, scale=0.5, **shared,
    )  # fmt: skip
    _check(kernels, kernels.hfp_write_kv(ctypes.byref(write)))
    batch.query_start = ctypes.addressof(ints["last"])
    _check(kernels, kernels.hfp_attention(ctypes.byref(attention)))
    return list(numbers["output"])


def _expected(query: list[float], key: list[float], value: list[float]) -> list[float]:
    scores = [0.5 * sum(query[d] * key[t * DIM + d] for d in range(DIM)) for t in range(TOKENS)]
    weights = [math.exp(score) for score in scores]
    return [sum(w * value[t * DIM + d] for t, w in enumerate(weights)) / sum(weights) for d in range(DIM)]


def _floats(values: list[float]) -> ctypes.Array:
    return (ctypes.c_float * len(values))(*values)


def _check(kernels: ctypes.CDLL, status: int) -> None:
    if status:
        raise library.NativeKernelError(kernels.hfp_status_message(status).decode())

"""What the machine could do at best, measured on the spot: the two limits of a roofline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from hfpaged.native import library

_READ_BYTES = 256 << 20  # more than the caches hold
_MATRIX_SIZES = (512, 1024, 2048)
_TRIES = 5


class Peaks(NamedTuple):
    """Of all threads together.

    Attributes:
        flops: floating point operations per second of a matrix product.
        read_bytes: bytes per second read from memory.
    """

    flops: float
    read_bytes: float


def measure_peaks(dtype: torch.dtype, threads: int) -> Peaks:
    """The fastest of torch's square matrix products, and of reading a buffer once."""
    flops = 0.0
    for size in _MATRIX_SIZES:
        left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
        flops = max(flops, 2 * size**3 / _fastest(lambda a=left, b=right: a @ b))
    buffer = torch.ones(_READ_BYTES // 4)
    seconds = _fastest(lambda: library.fingerprint(buffer.data_ptr(), _READ_BYTES, threads))
    return Peaks(flops, _READ_BYTES / seconds)


def _fastest(function: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best

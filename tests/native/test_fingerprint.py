"""The content hash sees every change and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from hfpaged.native import library

SEGMENT = 256 << 10


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def fingerprint(data: np.ndarray, threads: int = 1) -> int:
    return library.fingerprint(data.ctypes.data, data.nbytes, threads)


def test_known_value(isa):
    assert fingerprint(np.arange(1000).astype(np.uint8)) == 0xE752B05DBBB72666


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1023, 1024, 1025, 5000])
def test_every_single_bit_counts(isa, size):
    data = random_bytes(size)
    before = fingerprint(data)
    for position in {0, size - 1, size // 2, size // 3}:
        for bit in range(8):
            data[position] ^= 1 << bit
            assert fingerprint(data) != before
            data[position] ^= 1 << bit
    assert fingerprint(data) == before


@pytest.mark.parametrize("first", [0, 8, 1024 - 8, SEGMENT - 8])
@pytest.mark.parametrize("distance", [2, 4, 8, 64, 512, 1024, SEGMENT])
def test_swapped_words_count(first, distance):
    data = random_bytes(3 * SEGMENT)
    before = fingerprint(data)
    word = min(distance, 8)
    a, b = slice(first, first + word), slice(first + distance, first + distance + word)
    data[a], data[b] = data[b].copy(), data[a].copy()
    assert fingerprint(data) != before


def test_two_flipped_signs_count(isa):
    data = random_bytes(1 << 16)
    before = fingerprint(data)
    for distance in (2, 4, 16, 64, 128, 1024):
        for position in (3, 100 + distance):
            flipped = data.copy()
            flipped[position] ^= 0x80
            flipped[position + distance] ^= 0x80
            assert fingerprint(flipped) != before


def test_zeros_of_different_lengths_differ(isa):
    zeros = np.zeros(3000, dtype=np.uint8)
    assert len({fingerprint(zeros[:size]) for size in range(1, 3000)}) == 2999


def test_nothing_has_a_fingerprint():
    assert library.fingerprint(0, 0, 4) == fingerprint(np.zeros(0, dtype=np.uint8))


def test_equal_for_every_thread_count_and_address(isa):
    data = random_bytes(9 * SEGMENT + 123)
    unaligned = np.concatenate([data[:1], data])[1:]
    assert {fingerprint(data, threads) for threads in (1, 2, 3, 4)} == {fingerprint(unaligned, 2)}

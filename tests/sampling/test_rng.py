"""Random numbers depend on (seed, sample, position) and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from hfpaged.sampling.rng import philox4x32, uniforms

# philox4x32 with 10 rounds, from tests/kat_vectors of the Random123 library: counter, key, output.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def test_block_function_gives_the_published_answers() -> None:
    counters, keys, outputs = (np.array(column, dtype=np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True))
    assert np.array_equal(philox4x32(counters, keys), outputs)


def draw(seed: int, sample: int, position: int) -> float:
    return float(uniforms(*(np.array([number], dtype=np.uint64) for number in (seed, sample, position)))[0])


def test_numbers_use_53_bits_of_the_block() -> None:
    # The first two words of the first known answer, 27 and 26 bits of them.
    assert draw(0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_a_row_gets_the_same_number_in_any_batch() -> None:
    generator = np.random.default_rng(0)
    keys = [generator.integers(0, 2**64, 50, dtype=np.uint64) for _ in range(3)]
    together = uniforms(*keys)
    assert [draw(*row) for row in zip(*keys, strict=True)] == together.tolist()


@pytest.mark.parametrize("other", [(1 << 32, 0, 0), (0, 1, 0), (0, 1 << 32, 0), (0, 0, 1), (0, 0, 1 << 32)])
def test_every_part_of_the_key_counts(other: tuple[int, int, int]) -> None:
    assert draw(*other) != draw(0, 0, 0)


def test_numbers_are_uniform() -> None:
    count = 40_000
    zeros = np.zeros(count, dtype=np.uint64)
    numbers = uniforms(zeros + np.uint64(7), zeros, np.arange(count, dtype=np.uint64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    bins = np.bincount((numbers * 20).astype(int), minlength=20)
    # Chi-squared with 19 degrees of freedom exceeds 60 with probability 4e-6; the numbers are fixed, so it is no dice.
    assert ((bins - count / 20) ** 2 / (count / 20)).sum() < 60

"""Counter-based random numbers: the same (seed, sample, position) gives the same number on every platform.

Sampling that keeps no generator state draws the same token whatever the batch, the chunking or a preemption in between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The Philox4x32-10 block function (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: uint64[4, R], four 32-bit words a column.
        key: uint64[2, R], two 32-bit words a column.

    Returns:
        uint64[4, R], four random 32-bit words a column.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # A 32 x 32 bit product fits uint64, so the high and low words come from one multiplication.
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = (product_1 >> _WORD_BITS) ^ word_1 ^ key_0
        word_1 = product_1 & _LOW_WORD
        word_2 = (product_0 >> _WORD_BITS) ^ word_3 ^ key_1
        word_3 = product_0 & _LOW_WORD
        key_0 = (key_0 + _WEYL_0) & _LOW_WORD
        key_1 = (key_1 + _WEYL_1) & _LOW_WORD
    return np.stack([word_0, word_1, word_2, word_3])


def uniforms(
    seeds: npt.NDArray[np.uint64], sample_index: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one a row, each a pure function of its row's three integers.

    Args:
        seeds: uint64[R], the Philox key.
        sample_index: uint64[R], which of a prompt's samples the row is.
        positions: uint64[R], index in the sequence of the token to draw.

    Returns:
        float64[R], multiples of 2**-53.
    """
    counter = np.stack(
        [positions & _LOW_WORD, positions >> _WORD_BITS, sample_index & _LOW_WORD, sample_index >> _WORD_BITS]
    )
    key = np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS])
    words = philox4x32(counter, key)
    high_27_bits, low_26_bits = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high_27_bits * np.float64(1 << 26) + low_26_bits) * np.float64(2.0**-53)

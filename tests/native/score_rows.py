"""Rows of scores of every kind."""

from __future__ import annotations

import numpy as np

# Around the sizes of vectors and of what is looked at together.
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 130, 4095, 4096, 4097, 30_011)


def distributions() -> dict[str, np.ndarray]:
    """Scores of a vocabulary of 30,011 tokens."""
    normal = np.random.default_rng(0).standard_normal(30_011).astype(np.float32)
    half_excluded = 3 * normal
    half_excluded[1::2] = -np.inf
    one_stands_out = normal.copy()
    one_stands_out[777] = 12
    return {
        "flat": 0.1 * normal,
        "usual": 4 * normal,
        "steep": 12 * normal,
        "tied": np.round(8 * normal) / 4,
        "half excluded": half_excluded,
        "one stands out": one_stands_out,
        "far from zero": 3 * normal - 1000,
    }


DISTRIBUTIONS = distributions()

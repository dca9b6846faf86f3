"""Drawing by float32 masses, on every instruction set, against cumulative sums in double precision."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native.score_rows import DISTRIBUTIONS, SIZES

CANNOT_DRAW, UNDECIDED = -1, -2
UNIFORMS = np.concatenate([[0.0, 1e-9, 0.5, 1 - 2**-53], np.random.default_rng(1).random(60)])


def draw(kernels: ctypes.CDLL, scores: np.ndarray, uniforms: np.ndarray = UNIFORMS, threads: int = 1) -> np.ndarray:
    """An index of one row of scores for each number."""
    drawn = np.empty(len(uniforms), dtype=np.int64)
    addresses = (uniforms.ctypes.data, drawn.ctypes.data)
    kernels.hfp_draw(scores.ctypes.data, 0, len(scores), len(uniforms), *addresses, threads)
    return drawn


def drawn_exactly(scores: np.ndarray) -> np.ndarray:
    cumulative = np.exp(scores.astype(np.float64) - scores.max()).cumsum()
    return np.searchsorted(cumulative, UNIFORMS * cumulative[-1], side="right")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_indices_are_those_of_double_precision(kernels, isa, name):
    undecided = 0
    for size in SIZES:
        scores = DISTRIBUTIONS[name][-size:]
        drawn, exact = draw(kernels, scores), drawn_exactly(scores)
        decided = drawn != UNDECIDED
        assert np.array_equal(drawn[decided], exact[decided])
        undecided += np.count_nonzero(~decided)
    # Three of the numbers are always too near an end.
    assert undecided <= (3 + 0.1 * len(UNIFORMS)) * len(SIZES)


@pytest.mark.parametrize("scores", [[0, np.nan, 1], [0] * 40 + [np.nan], [0, np.inf], [-np.inf] * 20])
def test_rows_that_cannot_be_drawn_from(kernels, isa, scores):
    assert (draw(kernels, np.array(scores, dtype=np.float32)) == CANNOT_DRAW).all()


def test_excluded_entries_are_never_drawn(kernels, isa):
    scores = np.full(1000, -np.inf, dtype=np.float32)
    scores[[17, 500]] = [3, 4]
    assert set(draw(kernels, scores).tolist()) <= {17, 500, UNDECIDED}


@pytest.mark.parametrize("factor", [1e6, 1e9, 1e20, -1e30])
def test_scores_of_a_low_temperature_are_the_likeliest_ones(kernels, isa, factor):
    scores = DISTRIBUTIONS["usual"] * np.float32(factor)
    scores[:3] = -np.inf
    assert set(draw(kernels, scores).tolist()) == {int(scores.argmax()), UNDECIDED}


def test_threads_change_nothing(kernels):
    scores = DISTRIBUTIONS["usual"]
    assert np.array_equal(draw(kernels, scores), draw(kernels, scores, threads=4))

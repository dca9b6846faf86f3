"""The search for nuclei, on every instruction set, against sorting everything in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from native.score_rows import DISTRIBUTIONS, SIZES
from quiet import torch_threads

from hfpaged.sampling.nucleus import LikelyTokens, nuclei

TOP_P = (0.05, 0.5, 0.9, 0.99)


def likeliest(scores: np.ndarray, top_p: float) -> list[int]:
    """Ids of the nucleus; of equal scores at its edge the last ones."""
    order = np.argsort(scores, kind="stable")[::-1]
    masses = np.exp(scores[order].astype(np.float64) - scores.max())
    count = np.count_nonzero(masses.cumsum() - masses < top_p * masses.sum())
    return sorted(order[: max(1, count)].tolist())


def found(row: LikelyTokens, top_p: float) -> tuple[list[int], int] | None:
    """Ids of the nucleus, and how many of them are doubtful; None if too many are."""
    result = nuclei([row], [top_p])
    count = result.kept[0]
    if count < 0:
        return None
    ids, scores = result.ids[0, :count], result.scores[0, :count]
    columns = ids if row.ids is None else np.searchsorted(row.ids, ids)
    assert np.array_equal(scores, row.scores[columns])
    return ids.tolist(), result.doubtful[0]


def assert_is_nucleus(row: LikelyTokens, scores: np.ndarray, top_p: float) -> None:
    result = found(row, top_p)
    assert result is not None
    ids, doubtful = result
    expected = likeliest(scores, top_p)
    assert len(ids) - doubtful <= len(expected) <= len(ids)
    assert set(expected) <= set(ids)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_nuclei_are_what_a_sort_finds(isa, name):
    for size in SIZES:
        scores = DISTRIBUTIONS[name][-size:]
        for top_p in TOP_P:
            assert_is_nucleus(LikelyTokens(scores), scores, top_p)


def test_most_nuclei_are_free_of_doubt(isa):
    doubtful = [found(LikelyTokens(DISTRIBUTIONS["usual"][i:]), p)[1] for i in range(20) for p in (0.5, 0.9)]
    assert doubtful.count(0) >= 30


def test_the_likeliest_tokens_with_the_mass_of_all_are_enough(isa):
    scores = DISTRIBUTIONS["usual"]
    total = float(np.exp(scores.astype(np.float64) - scores.max()).sum())
    for count in (6_000, 20_000):
        ids = np.sort(np.argsort(scores)[-count:])
        assert_is_nucleus(LikelyTokens(scores[ids], ids, total), scores, 0.9)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 37, 999])
def test_rows_that_cannot_be_drawn_from_keep_nothing(isa, wrong, place):
    scores = np.zeros(1000, dtype=np.float32)
    scores[place] = wrong
    result = nuclei([LikelyTokens(scores), LikelyTokens(np.full(70, -np.inf, dtype=np.float32))], [0.9, 0.9])
    assert result.kept == [0, 0]
    assert np.isneginf(result.scores).all()


def test_everything_stays_without_top_p():
    scores = DISTRIBUTIONS["half excluded"]
    result = nuclei([LikelyTokens(scores)], [None])
    assert np.array_equal(result.ids[0], np.flatnonzero(np.isfinite(scores)))


def test_threads_and_neighbours_change_nothing():
    rows = [LikelyTokens(np.ascontiguousarray(scores)) for scores in DISTRIBUTIONS.values()]
    together = nuclei(rows * 3, [0.9] * 3 * len(rows))
    with torch_threads(4):
        on_threads = nuclei(rows * 3, [0.9] * 3 * len(rows))
    for other in (on_threads, nuclei(rows, [0.9] * len(rows))):
        assert other.kept == together.kept[: len(other.kept)]
        assert np.array_equal(other.ids, together.ids[: len(other.ids)])

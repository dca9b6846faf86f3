"""Finding the candidate tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hfpaged.sampling.candidates import Truncation, reaching_by_mask, reaching_by_row, truncate
from hfpaged.sampling.stages import TopP


def test_both_ways_to_find_the_reaching_entries_agree() -> None:
    scores = (torch.randn(9, 100) * 3).round()
    scores[4] = -9
    bounds = scores.topk(5).values[:, -1:]
    bounds[6] = torch.nan
    by_row, by_mask = reaching_by_row(scores, bounds), reaching_by_mask(scores, bounds)
    for (ids, values), (other_ids, other_values) in zip(by_row, by_mask, strict=True):
        assert np.array_equal(ids, other_ids)
        assert np.array_equal(values, other_values)
    assert len(by_row[4][0]) == 100
    assert len(by_row[6][0]) == 0


def test_candidates_are_in_token_order_and_few() -> None:
    scores = torch.randn(3, 50_257)
    candidates = truncate(scores, [Truncation(k, None, None) for k in (1, 50, 7)])
    for row, k in enumerate((1, 50, 7)):
        kept = candidates.ids[row][candidates.scores[row] > -torch.inf]
        assert kept.tolist() == sorted(scores[row].topk(k).indices.tolist())
    assert candidates.ids.shape[1] < 100


def test_a_token_at_a_rounding_boundary_of_top_p_is_doubtful() -> None:
    # Four tokens of a quarter each: whether the least likely one has 0.75 above it is a matter of rounding.
    scores = torch.full((2, 64), -torch.inf)
    scores[:, :4] = torch.tensor([1e-7, 0.0, 2e-7, 3e-7])
    candidates = truncate(scores, [Truncation(4, 0.75, None), Truncation(4, 0.7, None)])
    assert candidates.uncertain == [False, False]
    assert candidates.doubtful == {0: [1]}


def test_a_row_of_which_rounding_decides_about_too_much_is_uncertain() -> None:
    # One token has exactly top_p, and none of the others is worth the rounding of its probability.
    scores = torch.zeros(1, 50_000)
    scores[0, 7] = math.log(999 * (50_000 - 1))
    assert truncate(scores, [Truncation(None, 0.999, None)]).uncertain == [True]
    assert truncate(scores, [Truncation(None, 0.8, None)]).ids.shape[1] == 1


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_the_nucleus_of_a_large_vocabulary_is_what_a_full_sort_finds(spread: float, rounded: torch.dtype) -> None:
    top_p = [0.3, 0.9, 0.95, 0.99, 0.9999, 1.0] * 2
    scores = (torch.randn(len(top_p), 30_011) * spread).to(rounded).float()
    candidates = truncate(scores, [Truncation(None, p, 0.0) for p in top_p])
    assert sum(candidates.uncertain) <= 4
    full = scores.clone()
    TopP.apply(full, range(len(top_p)), [TopP(p) for p in top_p])
    for row in range(len(top_p)):
        if not candidates.uncertain[row]:
            kept = candidates.scores[row] > -torch.inf
            sure = kept.clone()
            sure[candidates.doubtful.get(row, [])] = False
            expected = set((full[row] > -torch.inf).nonzero()[:, 0].tolist())
            assert set(candidates.ids[row, sure].tolist()) <= expected <= set(candidates.ids[row, kept].tolist())
            assert torch.equal(candidates.scores[row, kept], scores[row, candidates.ids[row, kept]])


def test_a_row_tied_all_over_is_uncertain() -> None:
    scores = torch.zeros(2, 50_000)
    scores[1] = torch.randn(50_000)
    candidates = truncate(scores, [Truncation(50, None, None)] * 2)
    assert candidates.uncertain == [True, False]
    assert candidates.ids.shape[1] < 200

"""Finding the candidate tokens."""

from __future__ import annotations

import numpy as np
import torch

from hfpaged.sampling.candidates import Truncation, reaching_by_mask, reaching_by_row, truncate


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


def test_a_top_p_at_a_rounding_boundary_is_uncertain() -> None:
    # Four tokens of a quarter each: whether the first one has 0.75 above it is a matter of rounding.
    scores = torch.full((2, 64), -torch.inf)
    scores[:, :4] = torch.tensor([0.0, 1e-7, 2e-7, 3e-7])
    candidates = truncate(scores, [Truncation(4, 0.75, None), Truncation(4, 0.7, None)])
    assert candidates.uncertain.tolist() == [True, False]


def test_a_flat_distribution_without_top_k_is_uncertain() -> None:
    flat = truncate(torch.randn(1, 50_000) * 0.1, [Truncation(None, 0.9, None)])
    peaked = truncate(torch.randn(1, 50_000) * 6, [Truncation(None, 0.9, None)])
    assert flat.uncertain.tolist() == [True]
    assert peaked.uncertain.tolist() == [False]


def test_a_row_tied_all_over_is_uncertain() -> None:
    scores = torch.zeros(2, 50_000)
    scores[1] = torch.randn(50_000)
    candidates = truncate(scores, [Truncation(50, None, None)] * 2)
    assert candidates.uncertain.tolist() == [True, False]
    assert candidates.ids.shape[1] < 200

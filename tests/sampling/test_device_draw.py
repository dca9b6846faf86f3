"""Draws of a device: the tokens that `Sampler` draws, whatever the other rows ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling.draw_cases import drawn_by_the_host, logits, numbers_of, rows, table_of

from hfpaged.sampling.device_draw import draw_on_device
from hfpaged.sampling.draw_table import IS_SAMPLED, NUM_NUMBERS, DrawSettings, DrawTable
from hfpaged.sampling.sampler import SampleRow

GIVEN = -7


def drawn(scores, numbers):
    return draw_on_device(scores, torch.full((len(scores),), GIVEN), numbers).tolist()


@pytest.mark.parametrize("step", [None, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_kinds_of_rows_at_once_draw_what_the_host_draws(step, dtype):
    scores = logits(step, dtype)
    before = scores.clone()
    assert drawn(scores, torch.from_numpy(numbers_of(rows()))) == drawn_by_the_host(scores)
    assert torch.equal(scores, before)


def test_a_rows_token_does_not_depend_on_the_others():
    scores, numbers = logits(0.5), torch.from_numpy(numbers_of(rows()))
    together = drawn(scores, numbers)
    for index in range(20):
        assert drawn(scores[index : index + 1], numbers[:, index : index + 1]) == together[index : index + 1]


def test_rows_that_are_not_sampled_get_the_token_that_is_given():
    scores, numbers = logits()[:3], numbers_of(rows()[:3])
    numbers[IS_SAMPLED] = [1, 0, 1]
    assert drawn(scores, torch.from_numpy(numbers))[1] == GIVEN


def test_rows_with_numbers_that_are_none_give_no_token():
    scores = logits()[:10].clone()
    scores[3, 7], scores[5, 7] = float("nan"), float("inf")
    tokens = drawn(scores, torch.from_numpy(numbers_of(rows()[:10])))
    assert [index for index, token in enumerate(tokens) if token < 0] == [3, 5]


def test_a_table_by_row_leaves_other_rows_to_their_likeliest_token():
    some = [rows()[2], SampleRow([1], do_sample=False)]
    table = table_of(some)._replace(logit_rows=np.array([3, 1]))
    by_row = table.by_row(5)
    assert by_row.shape == (NUM_NUMBERS, 5)
    assert by_row[IS_SAMPLED].tolist() == [0, 0, 0, 1, 0]
    assert np.array_equal(by_row[:, 3], table.numbers[:, 0])
    assert table.sampled.tolist() == [0]
    assert table.can_be_by_row(4) and not table.can_be_by_row(1)
    assert not table._replace(logit_rows=np.array([3, 3])).can_be_by_row(4)
    assert DrawTable.neutral(3).sampled.tolist() == [0, 1, 2]


def test_rows_that_take_more_than_filters_are_the_hosts():
    assert DrawSettings.of(SampleRow([1], do_sample=False)) == DrawSettings(is_argmax=True)
    assert DrawSettings.of(SampleRow([1], do_sample=True, keep_scores=True)) is None

"""The kernel that draws, in Triton's interpreter: the tokens that the host draws."""

from __future__ import annotations

import pytest
import torch
from sampling.draw_cases import WARPERS, drawn_by_the_host, logits, numbers_of, rows

from hfpaged.runtime.device import draw_launch
from hfpaged.runtime.device.draw_launch import draw_by_kernel
from hfpaged.sampling.draw_table import IS_SAMPLED

GIVEN = -7


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(draw_launch, "BLOCK", 256)


def drawn(scores, numbers):
    return draw_by_kernel(scores, torch.full((len(scores),), GIVEN), torch.from_numpy(numbers)).tolist()


def test_a_row_of_each_kind_draws_what_the_host_draws():
    # Equal ones among them, also at the cuts.
    scores = logits(0.5, torch.bfloat16)
    count = len(WARPERS)
    assert drawn(scores[:count], numbers_of(rows()[:count])) == drawn_by_the_host(scores)[:count]


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_all_kinds_draw_what_the_host_draws(step, dtype):
    scores = logits(step, dtype)
    assert drawn(scores, numbers_of(rows())) == drawn_by_the_host(scores)


@pytest.mark.slow
def test_a_trial_finds_the_kernel_right_and_a_wrong_one_wrong(monkeypatch):
    trial = draw_launch._trial_problem.__wrapped__
    assert trial(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(draw_launch, "draw_by_kernel", lambda logits, argmax, numbers: argmax)
    assert trial(torch.device("cpu"), torch.bfloat16) == "the kernel draws other tokens"
    monkeypatch.setattr(draw_launch, "draw_by_kernel", lambda *_: 1 / 0)
    assert trial(torch.device("cpu"), torch.bfloat16).startswith("the kernel does not run here (ZeroDivisionError")


def test_rows_without_a_draw():
    scores, numbers = logits()[:6].clone(), numbers_of(rows()[:6])
    numbers[IS_SAMPLED, 1] = 0
    scores[2, 7], scores[3, 299], scores[4] = float("nan"), float("inf"), -float("inf")
    tokens = drawn(scores, numbers)
    assert tokens[1] == GIVEN
    assert tokens[2:5] == [-1, -1, -1]
    assert min(tokens[0], tokens[5]) >= 0
    # A part of a wider matrix.
    wide = torch.cat([scores, scores], dim=1)
    assert drawn(wide[:, :300], numbers) == tokens

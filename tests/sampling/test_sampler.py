"""Each row gets the token it would get alone, and its errors are its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hfpaged.errors import InvalidScoresError
from hfpaged.native import library
from hfpaged.sampling.distribution import inverse_cdf
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.sampler import Sampler, SampleRow, draw_from_scores

VOCAB = 3001
NAN, INF = math.nan, math.inf


def make_processors(kind: int) -> list[LogitsProcessor]:
    lists = [
        [],
        [TopKLogitsWarper(50), TopPLogitsWarper(0.9)],
        [TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.9)],
        [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.5), TopKLogitsWarper(7)],
        [MinNewTokensLengthLogitsProcessor(1, 9, [0]), TopKLogitsWarper(20), MinPLogitsWarper(0.1)],
        [MinPLogitsWarper(0.1)],
        [TopKLogitsWarper(2900), TopPLogitsWarper(0.99), MinPLogitsWarper(1e-3)],
        [TopPLogitsWarper(0.999)],
    ]
    return lists[kind % len(lists)]


def make_rows(count: int, keep_scores: bool = False) -> list[SampleRow]:
    return [
        SampleRow(
            list(range(1, 2 + n % 5)),
            CompiledProcessors(make_processors(n)),
            do_sample=n % 11 != 0,
            seed=n,
            sample_index=n % 3,
            keep_scores=keep_scores,
        )
        for n in range(count)
    ]


def make_logits(count: int, scale: float = 2.5) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count)) * scale


def test_a_row_gets_the_same_token_in_any_batch() -> None:
    logits, rows = make_logits(48), make_rows(48)
    together = Sampler().draw(logits, rows).tokens
    order = np.random.default_rng(0).permutation(48).tolist()
    shuffled = Sampler().draw(logits[order], [rows[n] for n in order]).tokens
    alone = [Sampler().draw(logits[n : n + 1], [rows[n]]).tokens[0] for n in range(48)]
    assert [together[n] for n in order] == shuffled
    assert together == alone


@pytest.mark.parametrize("tied", [False, True])
def test_candidates_give_the_token_of_the_full_vocabulary(tied: bool) -> None:
    for scale in (0.3, 2.5, 8.0):
        logits = make_logits(80, scale)
        if tied:
            # bfloat16 logits tie often: at the k-th score, and where top-p cuts.
            logits = (logits.bfloat16() * 2).round() / 2
        fast, slow = Sampler().draw(logits, make_rows(80)), Sampler(0).draw(logits, make_rows(80))
        assert fast.tokens == slow.tokens
        assert fast.errors == slow.errors == [None] * 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_distributions_over_many_tokens_give_the_token_of_a_full_sort(dtype: torch.dtype) -> None:
    logits = (torch.randn(32, 40_000) * 0.7).to(dtype)
    rows = [
        SampleRow([1], CompiledProcessors([TopPLogitsWarper((0.9, 0.95, 0.5)[n % 3])]), do_sample=True, seed=n)
        for n in range(32)
    ]
    assert Sampler().draw(logits, rows).tokens == Sampler(0).draw(logits, rows).tokens


def test_a_token_is_the_full_vocabularys_wherever_rounding_decides_what_is_kept() -> None:
    # Equal tokens, and top_p at a boundary between two: one more or less shifts most draws.
    logits = torch.zeros(200, VOCAB)
    rows = [
        SampleRow([1], CompiledProcessors([TopPLogitsWarper(1 - 5 / VOCAB)]), do_sample=True, seed=n)
        for n in range(200)
    ]
    assert Sampler().draw(logits, rows).tokens == Sampler(0).draw(logits, rows).tokens


def test_candidates_leave_the_scores_of_the_full_vocabulary() -> None:
    logits = make_logits(48)
    fast, slow = (Sampler(most).draw(logits, make_rows(48, keep_scores=True)) for most in (4096, 0))
    assert all(torch.equal(one, other) for one, other in zip(fast.scores, slow.scores, strict=True))


def test_without_kernels_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(48)
    expected = Sampler().draw(logits, make_rows(48)).tokens
    monkeypatch.setattr(library, "unavailable", lambda: "not built")
    monkeypatch.setattr(library, "load", None)
    assert Sampler().draw(logits, make_rows(48)).tokens == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_first_of_equal_maxima(dtype: torch.dtype) -> None:
    logits = make_logits(5).to(dtype)
    logits[0, [900, 7, 2000]] = 50
    logits[1] = -INF
    logits[2, [30, 20]] = NAN
    tokens = Sampler().draw(logits, [SampleRow([1])] * 5).tokens
    assert tokens == logits.float().argmax(-1).tolist()
    assert tokens[:3] == [7, 0, 20]


def test_float64_logits_are_compared_as_stock_does_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0 + 1e-12]], dtype=torch.float64)
    assert Sampler().draw(logits, [SampleRow([1])]).tokens == [1]


@pytest.mark.parametrize("kind", [0, 1, 2, 5])
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF] * VOCAB], ids=["nan", "inf", "all excluded"])
def test_an_impossible_distribution_is_that_rows_error_alone(kind: int, bad: list[float]) -> None:
    logits = make_logits(3)
    expected = Sampler().draw(logits, make_rows(3))
    logits[1, : len(bad)] = torch.tensor(bad)
    rows = make_rows(3)
    rows[1] = SampleRow([1], CompiledProcessors(make_processors(kind)), do_sample=True, keep_scores=True)
    drawn = Sampler().draw(logits, rows)
    assert isinstance(drawn.errors[1], InvalidScoresError)
    assert isinstance(drawn.errors[1], RuntimeError)
    assert drawn.tokens[1] == -1
    assert drawn.scores[1] is None
    assert [drawn.tokens[0], drawn.tokens[2]] == [expected.tokens[0], expected.tokens[2]]


class Raising(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")


def test_what_a_processor_raises_is_that_rows_error_alone() -> None:
    logits, rows = make_logits(3), make_rows(3)
    expected = Sampler().draw(logits, make_rows(3)).tokens
    rows[1] = SampleRow([1], CompiledProcessors([Raising(), TopKLogitsWarper(5)]), do_sample=True)
    drawn = Sampler().draw(logits, rows)
    assert [type(error) for error in drawn.errors] == [type(None), ZeroDivisionError, type(None)]
    assert [drawn.tokens[0], drawn.tokens[2]] == [expected[0], expected[2]]


def test_the_callers_pytorch_defaults_do_not_matter() -> None:
    logits, expected = make_logits(24), Sampler().draw(make_logits(24), make_rows(24)).tokens
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert Sampler().draw(logits, make_rows(24)).tokens == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_logits_of_a_training_or_inference_mode_step_are_taken() -> None:
    expected = Sampler().draw(make_logits(24), make_rows(24)).tokens
    with torch.inference_mode():
        logits = make_logits(24)
    drawn = Sampler().draw(logits, make_rows(24, keep_scores=True))
    assert drawn.tokens == expected
    assert not any(scores.is_inference() for scores in drawn.scores)
    drawn = Sampler().draw(make_logits(24).requires_grad_(), make_rows(24, keep_scores=True))
    assert drawn.tokens == expected
    assert not any(scores.requires_grad for scores in drawn.scores)


def test_logits_are_left_as_they_were() -> None:
    logits = make_logits(24)
    before = logits.clone()
    kept = Sampler().draw(logits, make_rows(24, keep_scores=True))
    assert torch.equal(logits, before)
    kept.scores[0].zero_()
    kept.logits[1].zero_()
    assert torch.equal(logits, before)


def test_frequencies_follow_the_probabilities() -> None:
    count = 20_000
    scores = torch.tensor([1.0, 0.0, -INF, 2.0, -INF])
    tokens = draw_from_scores(scores.expand(count, 5), [3] * count, range(count), [9] * count)
    expected = scores.softmax(0) * count
    assert torch.all((tokens.bincount(minlength=5) - expected).abs() <= 4 * expected.sqrt())


def test_inverse_cdf_ends_at_the_first_and_last_possible_index() -> None:
    scores = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF], [-INF, 0.0, -INF, 0.0, -INF], [NAN, 0, 0, 0, 0]])
    assert inverse_cdf(scores, np.array([0.0, 1 - 2**-53, 0.5])) == [1, 3, -1]


def test_draw_from_scores_draws_what_the_sampler_draws() -> None:
    logits = make_logits(6)
    rows = [SampleRow([1] * n, do_sample=True, seed=2**64 - n, sample_index=n) for n in range(1, 7)]
    tokens = draw_from_scores(
        logits, [row.seed for row in rows], [row.sample_index for row in rows], [len(row.tokens) for row in rows]
    )
    assert tokens.tolist() == Sampler().draw(logits, rows).tokens


def test_draw_from_scores_refuses_what_multinomial_refuses() -> None:
    with pytest.raises(RuntimeError, match="row 1"):
        draw_from_scores(torch.tensor([[0.0, 1.0], [0.0, NAN]]), [1, 1], [0, 1], [5, 5])

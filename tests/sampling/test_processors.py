"""Compiled processors give the scores that stock's own list gives, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hfpaged.errors import InvalidScoresError
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.sampler import Sampler, SampleRow

VOCAB = 211

# For each option of GenerationConfig that builds a processor: a random value for a prompt of this length.
OPTIONS: dict[str, Callable[[random.Random, int], Any]] = {
    "sequence_bias": lambda r, n: [[[r.randrange(1, VOCAB)], r.uniform(-5, 5)], [[3, r.randrange(1, VOCAB)], 4.0]],
    "encoder_repetition_penalty": lambda r, n: r.uniform(0.5, 2),
    "repetition_penalty": lambda r, n: r.uniform(0.5, 2),
    "no_repeat_ngram_size": lambda r, n: r.randint(1, 3),
    "encoder_no_repeat_ngram_size": lambda r, n: r.randint(1, 3),
    "bad_words_ids": lambda r, n: [[r.randrange(2, VOCAB)], [4, r.randrange(2, VOCAB)]],
    "min_length": lambda r, n: r.randint(1, 30),
    "min_new_tokens": lambda r, n: r.randint(1, 8),
    "forced_bos_token_id": lambda r, n: 5,
    "forced_eos_token_id": lambda r, n: 7,
    "max_length": lambda r, n: n + r.randint(1, 5),
    "remove_invalid_values": lambda r, n: True,
    "exponential_decay_length_penalty": lambda r, n: (r.randint(0, 3), 1.1),
    "suppress_tokens": lambda r, n: r.sample(range(VOCAB + 5), 9),
    "begin_suppress_tokens": lambda r, n: r.sample(range(VOCAB), 3),
    "temperature": lambda r, n: r.uniform(0.2, 3),
    "top_h": lambda r, n: r.uniform(0.1, 1),
    "top_k": lambda r, n: r.choice([0, 1, 5, 50, VOCAB, 500]),
    "top_p": lambda r, n: r.uniform(0, 1),
    "min_p": lambda r, n: r.choice([0.0, 0.02, 0.3]),
    "typical_p": lambda r, n: r.uniform(0.2, 0.95),
    "epsilon_cutoff": lambda r, n: 0.01,
    "eta_cutoff": lambda r, n: 0.02,
    "watermarking_config": lambda r, n: {"greenlist_ratio": 0.3, "context_width": 1},
    "renormalize_logits": lambda r, n: True,
}
COMMON = ("repetition_penalty", "min_new_tokens", "temperature", "top_k", "top_p", "min_p")
SAMPLING = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def random_options(generator: random.Random, prompt_length: int) -> dict[str, Any]:
    rare = [name for name in OPTIONS if name not in COMMON]
    names = [name for name in COMMON if generator.random() < 0.5]
    names += generator.sample(rare, generator.choice([0, 0, 1, 3]))
    do_sample = generator.random() < 0.8
    options = {"top_k": 0} if do_sample else {}
    options |= {name: OPTIONS[name](generator, prompt_length) for name in names if do_sample or name not in SAMPLING}
    eos_token_id = generator.choice([1, [1, 7]])
    return {"max_length": prompt_length + 3, **options, "do_sample": do_sample, "eos_token_id": eos_token_id}


@pytest.mark.parametrize("most_candidates", [0, 4096], ids=["full", "candidates"])
def test_scores_equal_stock_for_random_configs(stock_processors: Any, most_candidates: int) -> None:
    generator = random.Random(most_candidates)
    for _ in range(30):
        prompts = [[generator.randrange(VOCAB) for _ in range(generator.randint(1, 20))] for _ in range(6)]
        options = [random_options(generator, len(prompt)) for prompt in prompts]
        lists = [stock_processors(prompt, **chosen) for prompt, chosen in zip(prompts, options, strict=True)]
        rows = [
            SampleRow(prompt, CompiledProcessors(processors), chosen["do_sample"], keep_scores=True)
            for prompt, processors, chosen in zip(prompts, lists, options, strict=True)
        ]
        for _ in range(3):
            logits = torch.randn(6, VOCAB) * generator.choice([0.5, 3, 10])
            drawn = Sampler(most_candidates).draw(logits, rows)
            for row, (prompt, processors) in enumerate(zip(prompts, lists, strict=True)):
                expected, error = stock_answer(processors, prompt, logits[row])
                assert type(drawn.errors[row]) is error, options[row]
                if error is NoneType:
                    assert torch.equal(drawn.scores[row], expected), options[row]
                    assert torch.equal(drawn.logits[row], logits[row])
                prompt.append(generator.randrange(VOCAB))


def stock_answer(processors: LogitsProcessorList, prompt: list[int], logits: Tensor) -> tuple[Tensor | None, type]:
    """Stock's scores for one row, and the type of the error. Some releases make NaN of -inf in some processors."""
    try:
        scores = processors(torch.tensor([prompt]), logits.unsqueeze(0).clone())[0]
    except ValueError as error:
        return None, type(error)
    return scores, InvalidScoresError if scores.softmax(-1).isnan().any() else NoneType


def scores_of(processors: list[LogitsProcessor], logits: Tensor, tokens: list[int], do_sample: bool = True) -> Tensor:
    row = SampleRow(tokens, CompiledProcessors(processors), do_sample, keep_scores=True)
    drawn = Sampler().draw(logits, [row])
    assert drawn.errors == [None]
    return drawn.scores[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_processed_as_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(1, VOCAB).to(dtype)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    assert torch.equal(scores_of(processors, logits, [1]), processors(torch.tensor([[1]]), logits.float())[0])


def test_scores_tied_at_the_kth_all_stay() -> None:
    logits = torch.tensor([[5.0, 3.0, 4.0, 3.0, 3.0, 1.0]])
    assert (scores_of([TopKLogitsWarper(3)], logits, [0]) > -torch.inf).tolist() == [1, 1, 1, 1, 1, 0]


def test_as_many_tied_scores_stay_as_in_stock_when_top_p_cuts_among_them() -> None:
    for _ in range(30):
        logits = (torch.randn(1, VOCAB) * 2).round()
        processors = LogitsProcessorList([TopKLogitsWarper(40), TopPLogitsWarper(0.8)])
        expected = processors(torch.tensor([[0]]), logits)[0]
        scores = scores_of(processors, logits, [0])
        assert torch.equal(scores.sort().values, expected.sort().values)
        cut = scores[scores > -torch.inf].min()
        kept = (scores == cut).nonzero()
        assert torch.equal(kept, (logits[0] == cut).nonzero()[-len(kept) :])


class HalvingTopK(TopKLogitsWarper):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


def test_a_subclass_of_a_known_processor_is_called_itself() -> None:
    logits = torch.randn(1, VOCAB)
    assert torch.equal(scores_of([HalvingTopK(3)], logits, [0]), logits[0] / 2)


def test_unusual_warper_settings_are_kept() -> None:
    logits = torch.randn(1, VOCAB)
    processors = LogitsProcessorList(
        [TopKLogitsWarper(9, filter_value=-7.0), TopPLogitsWarper(0.1, min_tokens_to_keep=4)]
    )
    assert torch.equal(scores_of(processors, logits, [0]), processors(torch.tensor([[0]]), logits)[0])


def test_repetition_penalty_ignores_tokens_outside_the_logits() -> None:
    logits = torch.randn(1, VOCAB)
    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    expected = penalty(torch.tensor([[3]]), logits)[0]
    assert torch.equal(scores_of([penalty], logits, [3, VOCAB, VOCAB + 9], do_sample=False), expected)


def test_stages_run_in_the_order_of_the_list() -> None:
    logits = torch.randn(2, VOCAB)
    forward = LogitsProcessorList([TopPLogitsWarper(0.7), TemperatureLogitsWarper(0.3), MinPLogitsWarper(0.2)])
    backward = LogitsProcessorList(reversed(forward))
    rows = [SampleRow([0], CompiledProcessors(list_), True, keep_scores=True) for list_ in (forward, backward)]
    scores = Sampler().draw(logits, rows).scores
    for row, processors in enumerate((forward, backward)):
        assert torch.equal(scores[row], processors(torch.tensor([[0]]), logits[row : row + 1])[0])

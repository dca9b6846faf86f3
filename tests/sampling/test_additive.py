from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build_tiny

import hfpaged
from hfpaged.errors import InputError, UnsupportedOptionError
from hfpaged.sampling.additive import AdditivePenalty, LogitBias


def test_penalties_count_the_answer_and_not_the_prompt() -> None:
    scores = torch.zeros(1, 6)
    AdditivePenalty(presence=0.5, frequency=2.0, skip=2).apply(scores, np.array([1, 2, 3, 3, 4, 9]))
    assert scores.tolist() == [[0, 0, 0, -4.5, -2.5, 0]]


def test_a_bias_is_added_and_one_outside_the_vocabulary_is_nobodys() -> None:
    scores = torch.ones(1, 4)
    LogitBias((0, 3, 70), (-1.0, 4.0, 5.0)).apply(scores, np.array([]))
    assert scores.tolist() == [[0, 1, 1, 5]]


def test_the_engine_applies_them_to_that_request_alone() -> None:
    model = build_tiny("llama")
    with hfpaged.patched(model):
        engine = hfpaged.engine(model)

        def submit(**options):
            return engine.submit([5, 6, 7], max_new_tokens=20, do_sample=False, eos_token_id=-1, hfpaged=options)

        plain, biased, penal = submit(), submit(logit_bias={9: 1e6}), submit(presence_penalty=100.0)
        assert biased.result() == [9] * 20
        assert len(set(penal.result())) == 20
        assert plain.result() == submit().result() != penal.result()


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 1e9},
        {"presence_penalty": "1"},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": [1]},
    ],
)
def test_impossible_values_are_refused(options: dict) -> None:
    model = build_tiny("llama")
    with hfpaged.patched(model), pytest.raises(UnsupportedOptionError, match=next(iter(options))):
        hfpaged.engine(model).submit([5], max_new_tokens=1, hfpaged=options)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    model = build_tiny("llama")
    size = model.config.vocab_size
    with hfpaged.patched(model):
        engine = hfpaged.engine(model)
        with pytest.raises(InputError, match=f"logit_bias has token id {size}, outside the vocabulary of {size}"):
            engine.submit([5], max_new_tokens=1, hfpaged={"logit_bias": {1: 1.0, size: 1.0}})
        assert len(engine.submit([5], max_new_tokens=1, hfpaged={"logit_bias": {size - 1: 1.0}}).result()) == 1


def test_generate_refuses_them_by_name() -> None:
    model = build_tiny("llama")
    with hfpaged.patched(model), pytest.raises(UnsupportedOptionError, match="presence_penalty"):
        model.generate(torch.tensor([[5]]), max_new_tokens=1, hfpaged={"presence_penalty": 1.0})

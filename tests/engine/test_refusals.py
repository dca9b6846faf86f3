"""engine.submit and generate: what is refused before it is queued, and what ends alone in an error."""

from __future__ import annotations

import pytest
import torch
from batches import alone, left_padded
from engine.hooks import WAIT_SECONDS
from engine.one_prompt import GREEDY, PROMPT
from families import build_tiny
from transformers import LogitsProcessor

import hfpaged
from hfpaged.errors import InputError, NotPatchedError, RequestTooLargeError, UnsupportedOptionError


def test_too_large_a_request_is_refused_with_both_numbers(patched, stock_text):
    model, engine = patched(num_blocks=4)
    for attempt in (
        lambda: engine.submit(PROMPT, max_new_tokens=45, **GREEDY),
        lambda: alone(model, PROMPT, max_new_tokens=45, **GREEDY),
        # The second row alone would fit.
        lambda: model.generate(**left_padded([PROMPT, PROMPT[:3]]), max_new_tokens=45, **GREEDY),
    ):
        with pytest.raises(RequestTooLargeError, match="needs 5 KV blocks but the pool has 4") as caught:
            attempt()
        assert (caught.value.needed, caught.value.available) == (5, 4)
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0
    assert engine.submit(PROMPT, max_new_tokens=40, **GREEDY).result(WAIT_SECONDS) == stock_text


BAD_SUBMISSIONS = {
    "empty": ([], {}, InputError),
    "outside the vocabulary": ([5, 128], {}, InputError),
    "negative": ([5, -1], {}, InputError),
    "huge": ([2**70], {}, InputError),
    "float": ([5.5], {}, InputError),
    "text": ("hello", {}, InputError),
    "batch": (torch.tensor([[5, 6]]), {}, InputError),
    "unknown option": ([5], {"max_new_tokenz": 3}, UnsupportedOptionError),
    "beams": ([5], {"num_beams": 2}, UnsupportedOptionError),
    "several sequences": ([5], {"num_return_sequences": 2, "do_sample": True}, UnsupportedOptionError),
    "hidden states": ([5], {"output_hidden_states": True}, UnsupportedOptionError),
    "no cache": ([5], {"use_cache": False}, UnsupportedOptionError),
    "guidance": ([5], {"guidance_scale": 2.0}, UnsupportedOptionError),
    "token healing": ([5], {"token_healing": True}, UnsupportedOptionError),
    "no token": ([5], {"max_new_tokens": 0}, ValueError),
    "negative length": ([5], {"max_new_tokens": -3}, ValueError),
    "max_length": ([5, 6, 7], {"max_length": 3}, ValueError),
    "temperature": ([5], {"temperature": -1.0, "do_sample": True}, ValueError),
    "penalty": ([5], {"repetition_penalty": 0.0}, ValueError),
    "stop strings without a tokenizer": ([5], {"stop_strings": "a"}, ValueError),
    "hfpaged": ([5], {"hfpaged": 3}, UnsupportedOptionError),
    "unknown hfpaged option": ([5], {"hfpaged": {"sed": 3}}, UnsupportedOptionError),
    "seed": ([5], {"hfpaged": {"seed": 2**64}}, UnsupportedOptionError),
    "seeds": ([5], {"hfpaged": {"seed": [1, 2]}}, UnsupportedOptionError),
    "priority": ([5], {"hfpaged": {"priority": 1.5}}, UnsupportedOptionError),
    "salt": ([5], {"hfpaged": {"cache_salt": "x" * 300}}, UnsupportedOptionError),
    "prefix_cache": ([5], {"hfpaged": {"prefix_cache": 1}}, UnsupportedOptionError),
}


@pytest.mark.parametrize("name", BAD_SUBMISSIONS)
def test_bad_submission_is_refused_at_once_and_harms_nobody(patched, stock_text, name):
    prompt, options, error = BAD_SUBMISSIONS[name]
    engine = patched().engine
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(error):
        engine.submit(prompt, **options)
    assert running.result(WAIT_SECONDS) == stock_text
    assert engine.stats()["prompt_tokens"] == len(PROMPT)


def test_hooks_that_a_packed_step_would_skip_are_not_ignored(patched):
    model, engine = patched()
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(UnsupportedOptionError, match="user hooks"):
        engine.submit(PROMPT, **GREEDY)
    hook.remove()
    assert engine.submit(PROMPT, max_new_tokens=2, **GREEDY).result(WAIT_SECONDS)


BAD_BATCHES = {
    "no rows": {"input_ids": torch.zeros(0, 3, dtype=torch.long)},
    "outside the vocabulary": {"input_ids": torch.tensor([[5, 6], [5, 128]])},
    "negative": {"input_ids": torch.tensor([[5, 6], [-200, 7]])},
    "float": {"input_ids": torch.tensor([[5.0, 6.0]])},
    "empty row": {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])},
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batch_is_refused_whole_and_harms_nobody(patched, stock_text, name):
    model, engine = patched()
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(InputError):
        model.generate(**BAD_BATCHES[name], max_new_tokens=5, do_sample=False)
    assert running.result(WAIT_SECONDS) == stock_text
    assert engine.stats()["prompt_tokens"] == len(PROMPT)


def test_a_row_whose_scores_are_no_distribution_fails_alone(patched, stock_text):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("nan"))

    model, engine = patched()
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(RuntimeError):
        model.generate(**left_padded([PROMPT]), do_sample=True, max_new_tokens=5, logits_processor=[Nothing()])
    assert running.result(WAIT_SECONDS) == stock_text


def test_an_option_that_shows_to_be_wrong_later_ends_its_own_request_only(patched, stock_text):
    """Stock, too, finds a bias of a token that does not exist when it first processes scores."""
    engine = patched().engine
    running = engine.submit(PROMPT, max_new_tokens=40, **GREEDY)
    with pytest.raises(ValueError, match="vocabulary size is 128"):
        engine.submit([5], sequence_bias={(500,): 1.0}, max_new_tokens=5).result(WAIT_SECONDS)
    assert running.result(WAIT_SECONDS) == stock_text


def test_an_unpatched_model_has_no_engine():
    with pytest.raises(NotPatchedError):
        hfpaged.engine(build_tiny("llama"))

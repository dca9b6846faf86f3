"""Prompt lookup: what it guesses, and that guessing never changes the text."""

import copy

import pytest
import torch
from batches import left_padded

import hfpaged
from hfpaged.speculation.draft_length import RETRY_AFTER
from hfpaged.speculation.prompt_lookup import PromptLookup

pytestmark = pytest.mark.usefixtures("costs_stay_unknown")

# Of steps with 0 to 10 guesses.
CHEAP = [1 + 0.1 * guesses for guesses in range(11)]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14] * 2, [20, 21, 22], [30 + i for i in range(25)]]


def test_it_continues_the_latest_occurrence_of_the_longest_known_ngram():
    lookup = PromptLookup(num_tokens=3, max_ngram=2)
    assert lookup.propose([1, 2, 3, 4, 9, 2, 7, 8, 1, 2], 10, CHEAP) == [3, 4, 9]
    assert lookup.propose([1, 2, 3, 4, 9, 2, 7, 8, 1, 2, 5, 2], 10, CHEAP) == [5, 2]


def test_it_guesses_nothing_without_a_repetition_and_never_beyond_the_limit():
    assert PromptLookup(5).propose([1, 2, 3], 9, CHEAP) == []
    assert PromptLookup(5).propose([1, 2, 1], 0, CHEAP) == []
    assert len(PromptLookup(5).propose([1, 2, 3, 4, 5, 6, 1], 2, CHEAP)) == 2


def test_wrong_guesses_stop_the_guessing_but_for_a_try_now_and_then():
    lookup = PromptLookup(num_tokens=4)
    text = [1, 2, 3, 4, 5, 1]
    for _ in range(12):
        lookup.learn(proposed=4, accepted=0)
    lengths = [len(lookup.propose(text, 9, CHEAP)) for _ in range(3 * RETRY_AFTER)]
    assert sum(length > 0 for length in lengths) == 2


@pytest.fixture(scope="module")
def models(tiny_model):
    stock = tiny_model("llama")
    return stock, copy.deepcopy(stock).patch()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "eos_token_id": [8, 60, 61, 62, 63, 64]},
        {"do_sample": True, "temperature": 0.5, "top_k": 5},
    ],
    ids=str,
)
def test_a_batch_gets_the_same_text_with_and_without_lookup(models, options):
    _, patched = models
    texts = []
    for lookup in (None, 6):
        torch.manual_seed(3)
        texts.append(
            patched.generate(
                **left_padded(PROMPTS),
                max_new_tokens=48,
                pad_token_id=0,
                prompt_lookup_num_tokens=lookup,
                **options,
            )
        )
    assert torch.equal(*texts)
    hfpaged.engine(patched).check()


def test_accepted_guesses_save_steps(models):
    _, patched = models
    engine = hfpaged.engine(patched)
    ids = torch.tensor([PROMPTS[0]])
    # The penalty-free tiny model falls into a loop, which lookup guesses right.
    before = engine.stats()
    patched.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False, eos_token_id=-1)
    plain = engine.stats()
    patched.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=200,
        do_sample=False,
        eos_token_id=-1,
        prompt_lookup_num_tokens=8,
    )
    after = engine.stats()
    assert after["accepted_tokens"] > before["accepted_tokens"]
    assert after["steps"] - plain["steps"] < plain["steps"] - before["steps"]


def test_one_row_equals_stock_lookup(models):
    stock, patched = models
    ids = torch.tensor([PROMPTS[0]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0)
    expected = stock.generate(ids, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(patched.generate(ids, prompt_lookup_num_tokens=4, **options), expected)

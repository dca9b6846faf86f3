"""Log-probabilities through engine.submit: those of the text in float64, whatever the engine did to compute it."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from batches import random_prompts
from engine.hooks import paused
from families import VOCAB_SIZE, build_tiny
from transformers import PreTrainedModel

import hfpaged
from hfpaged.errors import UnsupportedOptionError
from hfpaged.sampling.logprobs import token_logprobs

PROMPTS = random_prompts((1, 2, 16, 17, 33, 40, 70), common_prefix=16)
TOP = 4
NEW = 9
BOTH = {"logprobs": TOP, "prompt_logprobs": TOP}
# float32 logits of these models, some of them soft-capped, against float64 ones.
TOLERANCE = 1e-4

ENGINES = {
    "program": {},
    "modules": {"tier": "modules"},
    "chunks of 7": {"max_batch_tokens": 7},
    "swap": {"num_blocks": 5, "preemption": "swap"},
    "recompute": {"num_blocks": 5, "preemption": "recompute"},
    "no prefix cache": {"prefix_caching": False},
}


class Reference(NamedTuple):
    model: PreTrainedModel
    exact: PreTrainedModel

    def check(self, prompt, handle, top=TOP):
        """Hold all that a handle says against one float64 forward over its text."""
        text = [*prompt, *handle.tokens]
        with torch.no_grad():
            scores = self.exact(torch.tensor([text])).logits[0].log_softmax(-1)
        assert handle.prompt_logprobs[0] is None
        found = [*handle.prompt_logprobs[1:], *handle.logprobs]
        assert len(found) == len(text) - 1
        for place, (one, row) in enumerate(zip(found, scores, strict=False)):
            assert one.token == text[place + 1]
            assert one.logprob == pytest.approx(float(row[one.token]), abs=TOLERANCE)
            assert abs(one.rank - 1 - int((row > row[one.token]).sum())) <= int(
                ((row - row[one.token]).abs() < TOLERANCE).sum() - 1
            )
            best = row.topk(top).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(best, abs=TOLERANCE)
            assert [float(row[token]) for token, _ in one.top] == pytest.approx(best, abs=TOLERANCE)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def reference(request):
    model = build_tiny(request.param)
    return Reference(model, copy.deepcopy(model).double())


def submit(engine, prompt, **options):
    return engine.submit(prompt, **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, **options})


@pytest.mark.parametrize("name", ENGINES)
def test_they_are_those_of_the_whole_text(reference, name):
    with hfpaged.patched(reference.model, **ENGINES[name]) as model:
        engine = hfpaged.engine(model)
        for _ in range(2):  # the second time with every prefix cached
            handles = [submit(engine, prompt, hfpaged=BOTH) for prompt in PROMPTS]
            bystanders = [submit(engine, prompt) for prompt in PROMPTS]
            for prompt, handle, bystander in zip(PROMPTS, handles, bystanders, strict=True):
                assert handle.result() == bystander.result()
                reference.check(prompt, handle)
                assert bystander.logprobs == bystander.prompt_logprobs == []
        engine.check()
        counters = engine.stats()
        if "preemption" in ENGINES[name]:
            assert counters[f"preemptions_{name}"] > 0
        # Prompts whose logits are wanted must not take blocks out of the cache; those that ask for none do.
        assert (counters["cached_prompt_tokens"] > 0) == (name != "no prefix cache")


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_a_prompt_that_loses_its_blocks_half_way_is_scored_once(reference, kind):
    short, long = PROMPTS[2][:15], PROMPTS[-1]
    with hfpaged.patched(reference.model, num_blocks=6, max_batch_tokens=6, preemption=kind) as model:
        engine = hfpaged.engine(model)
        submit(engine, short).result()
        with paused(engine):
            growing = submit(engine, short, max_new_tokens=50)
            handle = submit(engine, long, hfpaged=BOTH)
        handle.result()
        growing.result()
        assert engine.stats()[f"preemptions_{kind}"] > 0
        reference.check(long, handle)
        engine.check()


def test_a_scored_prompt_fills_the_prefix_cache_and_takes_nothing_from_it(reference):
    prompt = PROMPTS[-1]
    with hfpaged.patched(reference.model) as model:
        engine = hfpaged.engine(model)
        submit(engine, prompt, hfpaged=BOTH).result()
        again = submit(engine, prompt, hfpaged=BOTH)
        again.result()
        assert engine.stats()["cached_prompt_tokens"] == 0
        reference.check(prompt, again)
        new_tokens_only = submit(engine, prompt, hfpaged={"logprobs": 0})
        new_tokens_only.result()
        assert engine.stats()["cached_prompt_tokens"] == 64
        assert [one.logprob for one in new_tokens_only.logprobs] == pytest.approx(
            [one.logprob for one in again.logprobs], abs=TOLERANCE
        )
        assert {one.top for one in new_tokens_only.logprobs} == {()}


def test_they_are_the_models_own_whatever_reshapes_the_draw(reference):
    prompt = PROMPTS[3]
    options = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    with hfpaged.patched(reference.model) as model:
        handle = submit(hfpaged.engine(model), prompt, hfpaged={**BOTH, "seed": 3}, **options)
        handle.result()
        reference.check(prompt, handle)


def test_a_tokens_logprob_is_there_with_the_token(reference):
    with hfpaged.patched(reference.model) as model:
        handle = submit(hfpaged.engine(model), PROMPTS[4], hfpaged=BOTH)
        for place, token in enumerate(handle):
            assert handle.logprobs[place].token == token
            assert len(handle.prompt_logprobs) == len(PROMPTS[4])


@pytest.mark.parametrize("options", [{"logprobs": -1}, {"logprobs": True}, {"prompt_logprobs": 101}, {"logprobs": "2"}])
def test_bad_numbers_are_refused(reference, options):
    with hfpaged.patched(reference.model) as model:
        with pytest.raises(UnsupportedOptionError, match="must be an integer from 0 to 100"):
            submit(hfpaged.engine(model), PROMPTS[1], hfpaged=options)


def test_generate_says_where_they_are(reference):
    with hfpaged.patched(reference.model) as model:
        with pytest.raises(UnsupportedOptionError, match="generate has output_scores"):
            model.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=2, hfpaged={"logprobs": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_dtype_and_count(dtype):
    logits = torch.randn(130, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, 5:] = -torch.inf
    tokens = [row % VOCAB_SIZE for row in range(130)]
    found = token_logprobs(logits, tokens, [row % 3 and 200 for row in range(130)])
    exact = logits.double().log_softmax(-1)
    for row, one in enumerate(found):
        assert one.logprob == pytest.approx(float(exact[row, tokens[row]]), abs=1e-5)
        assert len(one.top) == (0 if row % 3 == 0 else VOCAB_SIZE)
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert one.rank == 1 + int((exact[row] > exact[row, tokens[row]]).sum())

"""A draft model guesses ahead for whole batches: the text is the target's own, and wrong guesses leave nothing."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import alone, left_padded, new_tokens, random_prompts
from families import build_tiny

import hfpaged
from hfpaged.errors import UnsupportedOptionError

pytestmark = pytest.mark.usefixtures("costs_stay_unknown")

PROMPTS = random_prompts((3, 10, 17, 33, 40), common_prefix=8)
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 24}
SAMPLE = {**GREEDY, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}


@pytest.fixture(scope="module")
def target():
    return build_tiny("llama")


@pytest.fixture(scope="module")
def plain(target):
    """What stock gives each prompt alone, without an assistant."""
    return [alone(target, prompt, **GREEDY) for prompt in PROMPTS]


def nearly(model, seed=3):
    """A copy whose weights are a little off, so that it guesses right often but not always."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.003 * torch.randn(parameter.shape, generator=generator)
    return draft


DRAFTS = {
    "itself": copy.deepcopy,
    "nearly itself": nearly,
    "a stranger": lambda target: build_tiny("qwen2", seed=9, num_hidden_layers=1),
    "itself, patched": lambda target: copy.deepcopy(target).patch(),
}
ENGINES = {
    "default": {},
    "modules": {"tier": "modules"},
    "chunks": {"max_batch_tokens": 7},
    "preempted": {"num_blocks": 9, "preemption": "recompute"},
    "swapped": {"num_blocks": 9, "preemption": "swap"},
}


def generate(model, prompts=PROMPTS, **options):
    return new_tokens(model.generate(**left_padded(prompts), **options), prompts)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_text_of_a_batch_is_stocks_of_each_prompt(target, plain, draft, engine):
    assistant = DRAFTS[draft](target)
    with hfpaged.patched(target, **ENGINES[engine]):
        assert generate(target, assistant_model=assistant, **GREEDY) == plain
        assert generate(target, assistant_model=assistant, **GREEDY) == plain  # prefixes of both models cached
        engine = hfpaged.engine(target)
        engine.check()
        stats = engine.stats()
        assert stats["blocks_free"] == stats["blocks_total"]
        assert stats["fallbacks"] == {}
        assert stats["draft_tokens"] > 0
        if draft.startswith("itself"):
            assert stats["accepted_tokens"] > 0.9 * stats["draft_tokens"]


@pytest.mark.parametrize("draft", ["itself", "nearly itself", "a stranger"])
def test_seeded_text_does_not_depend_on_the_draft(target, draft):
    assistant = DRAFTS[draft](target)
    seeds = {"seed": [7, 7, 2**63, 0, 5]}
    with hfpaged.patched(target):
        want = generate(target, hfpaged=seeds, **SAMPLE)
        assert generate(target, hfpaged=seeds, assistant_model=assistant, **SAMPLE) == want
        singly = [
            generate(target, [prompt], hfpaged={"seed": seed}, assistant_model=assistant, **SAMPLE)[0]
            for prompt, seed in zip(PROMPTS, seeds["seed"], strict=True)
        ]
        assert singly == want
        stats = hfpaged.engine(target).stats()
        if draft == "nearly itself":  # coupled by the noise, models that are alike draw alike
            assert stats["accepted_tokens"] > 0.25 * stats["draft_tokens"]


def test_distribution_is_the_targets(target):
    """Chi-square of the first two tokens of 1600 samples, against their exact probabilities."""
    prompt, rows, calls, top_k = PROMPTS[1], 8, 200, 4
    ids = torch.tensor([prompt] * rows)
    options = {**SAMPLE, "temperature": 1.0, "top_p": 1.0, "top_k": top_k, "max_new_tokens": 3}
    assistant, seen = build_tiny("llama", seed=1), Counter()
    torch.manual_seed(1)
    with hfpaged.patched(target):
        for _ in range(calls):
            out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options)
            seen.update(map(tuple, out[:, -3:-1].tolist()))
        assert hfpaged.engine(target).stats()["draft_tokens"] > rows * calls / 2
    expected = {pair: rows * calls * probability for pair, probability in pairs_after(target, prompt, top_k).items()}
    assert set(seen) <= set(expected)
    chi_square = sum((seen[pair] - count) ** 2 / count for pair, count in expected.items())
    assert chi_square < 37.7  # 15 degrees of freedom, one in a thousand


@torch.no_grad()
def pairs_after(model, prompt, top_k):
    def likeliest(tokens):
        values, ids = model(torch.tensor([tokens])).logits[0, -1].topk(top_k)
        return list(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))

    return {(first, second): p * q for first, p in likeliest(prompt) for second, q in likeliest([*prompt, first])}


def test_right_guesses_save_steps(target):
    with hfpaged.patched(target):
        engine = hfpaged.engine(target)
        generate(target, **GREEDY)
        before = engine.stats()["steps"]
        generate(target, **GREEDY)
        between = engine.stats()["steps"]
        generate(target, assistant_model=copy.deepcopy(target), **GREEDY)
        assert engine.stats()["steps"] - between < 0.4 * (between - before)


def test_ends_eos_and_scores_are_as_without(target, plain):
    eos = [plain[1][5], plain[3][9]]
    options = {**GREEDY, "eos_token_id": eos, "return_dict_in_generate": True, "output_scores": True}
    with hfpaged.patched(target):
        want = target.generate(**left_padded(PROMPTS), **options)
        got = target.generate(**left_padded(PROMPTS), assistant_model=nearly(target), **options)
    assert torch.equal(got.sequences, want.sequences)
    for step, (mine, theirs) in enumerate(zip(got.scores, want.scores, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=f"step {step}")


def test_options_that_look_at_the_text_just_do_not_guess(target):
    with hfpaged.patched(target):
        options = {**GREEDY, "repetition_penalty": 1.5}
        assert generate(target, assistant_model=nearly(target), **options) == generate(target, **options)


def test_many_calls_with_several_drafts_at_once(target, plain):
    drafts = [None, nearly(target), copy.deepcopy(target), nearly(target, seed=4)]

    def one(number):
        row = number % len(PROMPTS)
        return generate(target, [PROMPTS[row]], assistant_model=drafts[number % 4], **GREEDY)[0] == plain[row]

    with hfpaged.patched(target), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))
        hfpaged.engine(target).check()


def test_a_draft_that_was_trained_guesses_with_its_new_weights(target, plain):
    draft = build_tiny("llama", seed=5)
    with hfpaged.patched(target):
        engine = hfpaged.engine(target)
        assert generate(target, assistant_model=draft, **GREEDY) == plain
        before = engine.stats()
        draft.load_state_dict(target.state_dict())
        assert generate(target, assistant_model=draft, **GREEDY) == plain
        after = engine.stats()
    guessed, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert accepted > 0.9 * guessed


def test_a_draft_that_fails_costs_no_text(target, plain):
    draft = copy.deepcopy(target)
    draft.model.layers[1].mlp.gate_proj = torch.nn.Linear(3, 3)
    with hfpaged.patched(target):
        assert generate(target, assistant_model=draft, **GREEDY) == plain
        assert hfpaged.engine(target).stats()["fallbacks"] == {"draft model failed": len(PROMPTS)}


def test_what_only_stocks_loop_can_do_is_stocks(target):
    """One row runs there as in stock, and several are refused as in stock."""
    assistant = build_tiny("bloom")
    with hfpaged.patched(target):
        want = alone(target, PROMPTS[1], **GREEDY)
        assert alone(target, PROMPTS[1], assistant_model=assistant, **GREEDY) == want
        with pytest.raises(ValueError, match="batch_size = 1"):
            generate(target, assistant_model=assistant, **GREEDY)
        with pytest.raises(UnsupportedOptionError, match="seed"):
            alone(target, PROMPTS[1], assistant_model=assistant, hfpaged={"seed": 1}, **SAMPLE)


def test_one_row_gives_stocks_text(target):
    draft = nearly(target)
    for prompt in itertools.islice(PROMPTS, 2):
        want = alone(target, prompt, assistant_model=draft, **GREEDY)
        with hfpaged.patched(target):
            assert alone(target, prompt, assistant_model=draft, **GREEDY) == want

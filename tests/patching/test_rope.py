"""Rotary embeddings that depend on length: the engine takes what they treat alike, and leaves the live ones alone."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import left_padded, random_prompts
from families import build_tiny
from oracle import GREEDY, assert_stock_text, greedy, stats

ORIGINAL = 32
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
# Family, rope parameters, and whether its frequencies depend on the longest position of a forward.
KINDS = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, False),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}, False),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        False,
    ),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, True),
    "longrope": (
        "llama",
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, **FACTORS},
        True,
    ),
    "longrope of phi3": (
        "phi3",
        {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS},
        True,
    ),
}
DEPENDENT = [kind for kind, (_, _, dependent) in KINDS.items() if dependent]
WITHIN = random_prompts((25, 20, 5), common_prefix=16)
BEYOND = random_prompts((60, 9), seed=1)


def build(kind):
    family, parameters, _ = KINDS[kind]
    fields = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    # Dynamic scaling begins at the model's longest position, the others bring their own.
    longest = ORIGINAL if kind == "dynamic" else 128
    return build_tiny(
        family,
        num_hidden_layers=2,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": 10000.0, **parameters},
        **fields,
    )


def frequencies(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_bit_equal(buffers, others):
    assert list(buffers) == list(others)
    assert all(torch.equal(buffers[name], others[name]) for name in buffers)


@pytest.mark.parametrize("tier", ["auto", "modules"])
@pytest.mark.parametrize("kind", KINDS)
def test_within_reach(kind, tier):
    model = build(kind).patch(tier=tier)
    before, objects = frequencies(model), dict(model.named_buffers())
    assert_stock_text(model, WITHIN)
    assert_bit_equal(frequencies(model), before)
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_reach(kind):
    model = build(kind).patch()
    greedy(model, WITHIN)
    options = {**left_padded(BEYOND), "max_new_tokens": 6, **GREEDY}
    if kind in DEPENDENT:
        assert torch.equal(model.generate(**options), build(kind).generate(**options))
        assert stats(model)["fallbacks"] == {"rope changes with length": 1}
    else:
        assert_stock_text(model, BEYOND)


@pytest.mark.parametrize("kind", DEPENDENT)
def test_short_after_long_after_short(kind):
    """The live module's frequencies are then those of the long call; the engine's never were."""
    model = build(kind).patch()
    want = greedy(build(kind), WITHIN[:1])
    for _ in range(2):
        assert greedy(model, WITHIN[:1]) == want
        greedy(model, BEYOND)
    assert greedy(model, WITHIN[:1]) == want
    assert stats(model)["fallbacks"] == {"rope changes with length": 2}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_the_last_token_that_fits(kind):
    model = build(kind).patch()
    prompt = WITHIN[:1]
    fits = ORIGINAL - len(prompt[0])
    assert_stock_text(model, prompt, num_new=fits)
    fresh = copy.deepcopy(model)
    assert greedy(model, prompt, num_new=fits + 1) == greedy(fresh, prompt, num_new=fits + 1)
    assert stats(model)["fallbacks"] == {"rope changes with length": 1}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_moved_frequencies_move_with_the_model(kind):
    model = build(kind).patch()
    greedy(model, WITHIN)
    model.half().float()
    assert_stock_text(model, WITHIN)


@pytest.mark.parametrize("kind", DEPENDENT)
def test_a_long_forward_while_the_engine_runs(kind):
    """Each computes with its own frequencies."""
    model = build(kind).patch()
    want = greedy(build(kind), WITHIN)
    long_ids = torch.tensor(BEYOND[:1])
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        logits = build(kind)(long_ids).logits
        texts = pool.submit(lambda: [greedy(model, WITHIN) for _ in range(5)])
        while not texts.done():
            assert torch.equal(model(long_ids).logits, logits)
    assert texts.result() == [want] * 5

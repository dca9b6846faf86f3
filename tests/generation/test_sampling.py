"""Sampled text: decided by seed, sample index and position alone, with the distribution of stock."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import alone, left_padded, new_tokens, random_prompts
from families import build_tiny
from transformers.generation.streamers import BaseStreamer

import hfpaged
from hfpaged.errors import UnsupportedOptionError

PROMPTS = random_prompts((1, 5, 16, 17, 30, 33))
SEEDS = [11, 2**64 - 1, 0, 11, 5, 7]
NEW = 20
SAMPLE = {"do_sample": True, "max_new_tokens": NEW, "top_k": 40, "top_p": 0.95, "temperature": 1.2, "eos_token_id": -1}


@pytest.fixture(scope="module")
def model():
    return build_tiny("qwen2")


@pytest.fixture(scope="module")
def seeded(model):
    """What each prompt gives alone with its own seed."""
    with hfpaged.patched(model):
        return [
            alone(model, prompt, hfpaged={"seed": seed}, **SAMPLE) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
        ]


def batch(model, **options):
    out = model.generate(**left_padded(PROMPTS), hfpaged={"seed": list(SEEDS)}, **{**SAMPLE, **options})
    return new_tokens(out, PROMPTS)


def preemptions(model):
    stats = hfpaged.engine(model).stats()
    return stats["preemptions_swap"] + stats["preemptions_recompute"]


def test_seeds_decide_the_text(model, seeded):
    with hfpaged.patched(model):
        assert batch(model) == seeded
        assert batch(model) == seeded  # warm
        assert hfpaged.engine(model).stats()["cached_prompt_tokens"] > 0
    assert len(set(map(tuple, seeded))) == len(PROMPTS)


@pytest.mark.parametrize("engine", [{"max_batch_tokens": 7}, {"tier": "modules"}, {"attention_backend": "torch"}])
def test_seeds_decide_the_text_on_every_path(model, seeded, engine):
    with hfpaged.patched(model, **engine):
        assert batch(model) == seeded


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_preemption_does_not_change_the_draws(model, seeded, kind):
    with hfpaged.patched(model, num_blocks=5, preemption=kind):
        assert batch(model) == seeded
        assert preemptions(model) > 0


class Collector(BaseStreamer):
    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        pass


def test_streaming_does_not_change_the_draws(model, seeded):
    with hfpaged.patched(model):
        for row, prompt in enumerate(PROMPTS):
            streamer = Collector()
            assert alone(model, prompt, streamer=streamer, hfpaged={"seed": SEEDS[row]}, **SAMPLE) == seeded[row]
            assert [token for (token,) in streamer.puts[1:]] == seeded[row]
        # A batch with a streamer is drawn in lockstep.
        streamer = Collector()
        assert batch(model, streamer=streamer) == seeded
        assert [list(row) for row in zip(*streamer.puts[1:], strict=True)] == seeded


def test_neighbours_do_not_change_the_draws(model, seeded):
    with hfpaged.patched(model, max_batch_tokens=20), ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            texts = pool.map(
                lambda row: alone(model, PROMPTS[row], hfpaged={"seed": SEEDS[row]}, **SAMPLE), range(len(PROMPTS))
            )
            assert list(texts) == seeded


def test_manual_seed_reproduces_a_call(model):
    with hfpaged.patched(model):
        texts = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            texts.append([new_tokens(model.generate(**left_padded(PROMPTS), **SAMPLE), PROMPTS) for _ in range(2)])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_greedy_leaves_the_global_generator_alone(model):
    with hfpaged.patched(model):
        before = torch.get_rng_state()
        model.generate(**left_padded(PROMPTS), do_sample=False, max_new_tokens=3)
        assert torch.equal(before, torch.get_rng_state())


def test_one_seed_gives_equal_prompts_different_texts(model):
    with hfpaged.patched(model):
        out = model.generate(**left_padded([PROMPTS[1]] * 4), hfpaged={"seed": 5}, **SAMPLE)
    assert len(set(map(tuple, out.tolist()))) == 4


@pytest.mark.parametrize("seeds", [5, [5, 6]])
def test_return_sequences_are_distinct_and_reproducible(model, seeds):
    prompts = PROMPTS[3:5]

    def sequences(copies):
        out = model.generate(**left_padded(prompts), num_return_sequences=copies, hfpaged={"seed": seeds}, **SAMPLE)
        return out.tolist()

    with hfpaged.patched(model, num_blocks=20):
        first = sequences(8)
        assert first == sequences(8)
        if isinstance(seeds, list):
            # Samples are numbered within their prompt: more of them do not change the first ones.
            assert first[:3] + first[8:11] == sequences(3)
    assert len(set(map(tuple, first))) == 16


def test_handles_draw_as_generate_does(model, seeded):
    with hfpaged.patched(model):
        handles = [
            hfpaged.engine(model).submit(prompt, hfpaged={"seed": seed}, **SAMPLE)
            for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
        ]
        assert [handle.result(30) for handle in handles] == seeded


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True, [1, None], (1, 2), [1, 2, 3]])
def test_bad_seeds_are_refused(model, seed):
    with hfpaged.patched(model), pytest.raises(UnsupportedOptionError, match="seed"):
        model.generate(**left_padded(PROMPTS[:2]), hfpaged={"seed": seed}, **SAMPLE)


# ---- the distribution ----

TINY_VOCABULARY = 12
OPTIONS = {
    "plain": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "min_p": {"top_k": 0, "min_p": 0.15},
    "penalty": {"top_k": 0, "repetition_penalty": 1.7},
}


def is_plausible(counts, probabilities):
    """Pearson's chi-square at about four standard deviations, rare outcomes pooled."""
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in probabilities.items() if p > 0}
    expected = {outcome: p * total for outcome, p in probabilities.items()}
    common = [outcome for outcome, e in expected.items() if e >= 5]
    bins = [(counts[outcome], expected[outcome]) for outcome in common]
    rest = total - sum(e for _, e in bins)
    if rest > 5:
        bins.append((total - sum(c for c, _ in bins), rest))
    freedom = len(bins) - 1
    statistic = sum((c - e) ** 2 / e for c, e in bins)
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return deviation < 4


def two_token_probabilities(model, prompt, options):
    """Of each pair of new tokens, from the scores that stock processes."""

    def next_probabilities(text):
        out = model.generate(
            **left_padded([text]), do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
            **options,
        )  # fmt: skip
        return out.scores[0][0].double().softmax(-1).tolist()

    return {
        (first, second): p * q
        for first, p in enumerate(next_probabilities(prompt))
        if p > 0
        for second, q in enumerate(next_probabilities([*prompt, first]))
    }


@pytest.mark.parametrize("in_lockstep", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_is_stocks(name, in_lockstep):
    model = build_tiny("llama", vocab_size=TINY_VOCABULARY, num_hidden_layers=1, std=0.12)
    prompt, options = [5, 3, 8, 5], {"eos_token_id": -1, **OPTIONS[name]}
    probabilities = two_token_probabilities(model, prompt, options)
    with hfpaged.patched(model):
        out = model.generate(
            **left_padded([prompt]), do_sample=True, max_new_tokens=2, num_return_sequences=3000,
            streamer=Collector() if in_lockstep else None, hfpaged={"seed": 1}, **options,
        )  # fmt: skip
    counts = Counter(map(tuple, out[:, 4:].tolist()))
    assert is_plausible(counts, probabilities)
    # The test can fail: the same counts under a slightly hotter distribution.
    hotter = {outcome: p**0.6 for outcome, p in probabilities.items()}
    assert not is_plausible(counts, {outcome: p / sum(hotter.values()) for outcome, p in hotter.items()})

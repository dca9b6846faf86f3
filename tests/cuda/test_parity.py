"""Greedy text over the stand-in is token-equal to stock's on each prompt alone: a step ahead, captured or not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from batches import alone, random_prompts
from families import FAMILIES, build_tiny
from generation.test_parity import CHUNKS, ENDLESS, IN_DEPTH, LENGTHS, NEW, Case, counters, streamed

import hfpaged

pytestmark = pytest.mark.usefixtures("cuda")
# One with nothing special, one with everything that attention can have, sinks, and experts; the others are slow.
FAST = ("llama", "gemma2", "gpt_oss", "mixtral")


def families(names, fast=FAST):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


@pytest.fixture(params=families(IN_DEPTH))
def case(request, stock_greedy):
    model = build_tiny(request.param)
    prompts = random_prompts(LENGTHS, common_prefix=20)
    return Case(model, prompts, [stock_greedy(model, prompt, NEW) for prompt in prompts], NEW)


def test_each_prompt_alone(case):
    with hfpaged.patched(case.model):
        case.check([alone(case.model, prompt, max_new_tokens=NEW, **ENDLESS) for prompt in case.prompts])
        counted = counters(case)
        assert (counted["backend"], counted["tier"]) == ("flashinfer", "modules")
        assert counted["steps_ahead"] == len(case.prompts) * (NEW - 1)
        assert counted["captured_steps"] > 0 or counted["capture_problem"]


@pytest.mark.parametrize(
    "chunk", [chunk if chunk in (16, 4096) else pytest.param(chunk, marks=pytest.mark.slow) for chunk in CHUNKS]
)
def test_batched_in_chunks_of(case, chunk):
    with hfpaged.patched(case.model, max_batch_tokens=chunk):
        case.check(case.generate_batch())


def test_warm_from_an_earlier_call(case):
    with hfpaged.patched(case.model):
        case.check(case.generate_batch())
        cold = counters(case)["cached_prompt_tokens"]
        case.check(case.generate_batch())
        reusable = sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts)
        assert counters(case)["cached_prompt_tokens"] - cold == reusable


@pytest.mark.parametrize("kind", ["swap", "recompute"])
@pytest.mark.parametrize("chunk", [17, pytest.param(512, marks=pytest.mark.slow)])
def test_preempted_by(case, kind, chunk):
    with hfpaged.patched(case.model, num_blocks=7, preemption=kind, max_batch_tokens=chunk):
        case.check(case.generate_batch())
        assert counters(case)[f"preemptions_{kind}"] > 0
        assert counters(case)["blocks_free"] == 7
        hfpaged.engine(case.model).check()


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_eight_threads_with_mixed_options(case, preemption):
    """Rows that the device draws, rows that the host draws, and streams, in a pool too small for all."""
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 20, "eos_token_id": -1, "pad_token_id": 0}
    penalised = {**ENDLESS, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    prompts = random.Random(5).sample(case.prompts, 8)
    options = [ENDLESS, penalised, {**sampling, "hfpaged": {"seed": 4}}]
    with hfpaged.patched(case.model):
        want = [[alone(case.model, prompt, max_new_tokens=NEW, **one) for one in options] for prompt in prompts]

    def user(index):
        order = random.Random(index).sample(range(3), 3)
        ways = [random.Random(index + one).choice([alone, streamed]) for one in order]
        return {
            one: way(case.model, prompts[index], max_new_tokens=NEW, **options[one])
            for one, way in zip(order, ways, strict=True)
        }

    with hfpaged.patched(case.model, num_blocks=12, max_batch_tokens=24, preemption=preemption):
        with ThreadPoolExecutor(8) as pool:
            for texts, wanted in zip(pool.map(user, range(8)), want, strict=True):
                assert [texts[one] for one in range(3)] == wanted
        assert counters(case)["blocks_free"] == 12


OTHERS = families(sorted(set(FAMILIES) - set(IN_DEPTH)), fast=("deepseek_v3", "gpt2", "phi3"))


@pytest.mark.parametrize("family", OTHERS)
def test_every_other_supported_family(family, stock_greedy):
    model = build_tiny(family)
    if hfpaged.support(model):
        pytest.skip("; ".join(hfpaged.support(model)))
    prompts = random_prompts((3, 16, 33))
    case = Case(model, prompts, [stock_greedy(model, prompt, 8) for prompt in prompts], 8)
    with hfpaged.patched(model, max_batch_tokens=20):
        case.check(case.generate_batch())
        assert not counters(case)["fallbacks"]

"""Greedy text is token-equal to stock's on each prompt alone, however the engine comes to it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from batches import alone, left_padded, new_tokens, random_prompts
from excuse import assert_same_greedy_text
from families import FAMILIES, build_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hfpaged

# By name, the ways to run a step: the fastest there is for the model, its own modules, and without native code.
ENGINES = {"default": {}, "modules": {"tier": "modules"}, "torch": {"attention_backend": "torch"}}
IN_DEPTH = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral")
BLOCK = 16
# One below, at and one above block boundaries, and what a user may type first.
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49)
CHUNKS = (1, 15, 16, 17, 4096)
NEW = 12
ENDLESS = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


@dataclass
class Case:
    """A model, prompts, and the new tokens stock gives each of them alone."""

    model: PreTrainedModel
    prompts: list[list[int]]
    want: list[list[int]]
    num_new: int

    def up_to(self, length: int) -> Case:
        """The same with the prompts that are no longer."""
        chosen = [pair for pair in zip(self.prompts, self.want, strict=True) if len(pair[0]) <= length]
        return Case(self.model, [prompt for prompt, _ in chosen], [want for _, want in chosen], self.num_new)

    def check(self, texts) -> None:
        assert len(texts) == len(self.prompts)
        for prompt, got, want in zip(self.prompts, texts, self.want, strict=True):
            assert_same_greedy_text(self.model, prompt, got, want)

    def generate_batch(self) -> list[list[int]]:
        out = self.model.generate(**left_padded(self.prompts), max_new_tokens=self.num_new, **ENDLESS)
        return new_tokens(out, self.prompts)


@pytest.fixture(scope="module", params=IN_DEPTH)
def case(request, stock_greedy):
    model = build_tiny(request.param)
    prompts = random_prompts(LENGTHS, common_prefix=20)
    return Case(model, prompts, [stock_greedy(model, prompt, NEW) for prompt in prompts], NEW)


@pytest.fixture(params=ENGINES)
def options(request):
    return ENGINES[request.param]


def counters(case):
    return hfpaged.engine(case.model).stats()


def test_each_prompt_alone(case, options):
    with hfpaged.patched(case.model, **options):
        case.check([alone(case.model, prompt, max_new_tokens=NEW, **ENDLESS) for prompt in case.prompts])
        assert not counters(case)["fallbacks"]
        assert counters(case)["backend"] == options.get("attention_backend", "native")


@pytest.mark.parametrize(
    ("engine", "chunk"), [*(("default", chunk) for chunk in CHUNKS), ("modules", 16), ("torch", 15), ("torch", 17)]
)
def test_batched_in_chunks_of(case, engine, chunk):
    with hfpaged.patched(case.model, max_batch_tokens=chunk, **ENGINES[engine]):
        case.check(case.generate_batch())
        # Without the tokens that shared prefixes saved, and the last ones, which are never computed.
        stats = counters(case)
        computed = stats["prompt_tokens"] - stats["cached_prompt_tokens"] + len(case.prompts) * (NEW - 1)
        assert stats["steps"] >= computed / chunk


def test_warm_from_an_earlier_call(case, options):
    with hfpaged.patched(case.model, **options):
        case.check(case.generate_batch())
        cold = counters(case)["cached_prompt_tokens"]
        case.check(case.generate_batch())
        reusable = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in case.prompts)
        assert counters(case)["cached_prompt_tokens"] - cold == reusable


def test_without_prefix_cache(case):
    with hfpaged.patched(case.model, prefix_caching=False):
        case.check(case.generate_batch())
        case.check(case.generate_batch())
        assert counters(case)["cached_prompt_tokens"] == 0


@pytest.mark.parametrize("kind", ["swap", "recompute"])
@pytest.mark.parametrize("chunk", [17, 512])
def test_preempted_by(case, options, kind, chunk):
    with hfpaged.patched(case.model, num_blocks=7, preemption=kind, max_batch_tokens=chunk, **options):
        case.check(case.generate_batch())
        assert counters(case)[f"preemptions_{kind}"] > 0
        assert counters(case)["blocks_free"] == 7
        hfpaged.engine(case.model).check()


class Collector(BaseStreamer):
    """Keeps the new tokens that it is given."""

    def __init__(self):
        self.tokens = []
        self.ended = False
        self._prompt_seen = False

    def put(self, value):
        if self._prompt_seen:
            self.tokens += value.tolist()
        self._prompt_seen = True

    def end(self):
        self.ended = True


def streamed(model, prompt, **options):
    streamer = Collector()
    text = alone(model, prompt, streamer=streamer, **options)
    assert streamer.ended
    assert streamer.tokens == text
    return text


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "eos_token_id": -1, "pad_token_id": 0}
PENALISED = {**ENDLESS, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_eight_threads_with_mixed_options(case, preemption):
    prompts = random.Random(5).sample(case.prompts, 8)
    penalised = [alone(case.model, prompt, max_new_tokens=NEW, **PENALISED) for prompt in prompts]
    with hfpaged.patched(case.model):
        sampled = [
            alone(case.model, prompt, max_new_tokens=NEW, hfpaged={"seed": seed}, **SAMPLED)
            for seed, prompt in enumerate(prompts)
        ]

    def calls(index):
        prompt, greedy = prompts[index], case.want[case.prompts.index(prompts[index])]
        yield partial(alone, **ENDLESS), prompt, greedy
        yield partial(streamed, **ENDLESS), prompt, greedy
        yield partial(alone, **PENALISED), prompt, penalised[index]
        yield partial(alone, hfpaged={"seed": index}, **SAMPLED), prompt, sampled[index]
        yield partial(streamed, hfpaged={"seed": index}, **SAMPLED), prompt, sampled[index]

    def user(index):
        mine = list(calls(index))
        random.Random(index).shuffle(mine)
        return [(call(case.model, prompt, max_new_tokens=NEW), want) for call, prompt, want in mine]

    with hfpaged.patched(case.model, num_blocks=12, max_batch_tokens=24, preemption=preemption):
        with ThreadPoolExecutor(8) as pool:
            for answers in pool.map(user, range(8)):
                for got, want in answers:
                    assert got == want
        stats = counters(case)
        assert stats["blocks_free"] == 12
        assert stats["running"] == stats["waiting"] == 0


@pytest.mark.parametrize("tier", ["auto", "modules"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(IN_DEPTH)))
def test_every_other_supported_family(family, tier, stock_greedy):
    model = build_tiny(family)
    if hfpaged.support(model):
        pytest.skip("; ".join(hfpaged.support(model)))
    prompts = random_prompts((3, 16, 33))
    case = Case(model, prompts, [stock_greedy(model, prompt, 8) for prompt in prompts], 8)
    with hfpaged.patched(model, max_batch_tokens=20, tier=tier):
        case.check(case.generate_batch())
        assert not counters(case)["fallbacks"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def licence(smollm2_path):
    """Token ids of a real text, long enough for every prompt."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return AutoTokenizer.from_pretrained(smollm2_path)(text)["input_ids"]


def test_smollm2_smoke(smollm2, licence, stock_greedy):
    prompts = [licence[start : start + length] for start, length in ((100, 4), (400, 17), (0, 64))]
    case = Case(smollm2, prompts, [stock_greedy(smollm2, prompt, 8) for prompt in prompts], 8)
    with hfpaged.patched(smollm2, max_batch_tokens=40):
        case.check(case.generate_batch())


@pytest.fixture(scope="module")
def smollm2_case(smollm2, licence, stock_greedy):
    edges = [size + off for size in (16, 32, 64, 256, 512) for off in (-1, 0, 1)]
    lengths = [3, 5, 8, 12, *edges, 23, 41, 77, 100, 128, 150, 200, 300, 400, 600, 700, 800, 900]
    assert len(lengths) == 32
    # Every third begins at the text's own beginning, so that prefixes are shared.
    starts = [0 if index % 3 == 0 else 37 * index for index in range(len(lengths))]
    prompts = [licence[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return Case(smollm2, prompts, [stock_greedy(smollm2, prompt, 64) for prompt in prompts], 64)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 512, 16384])
def test_smollm2_batched_in_chunks_of(smollm2_case, chunk):
    # A token a step reads all weights for each: that takes too long for long prompts.
    case = smollm2_case.up_to(100) if chunk == 1 else smollm2_case
    with hfpaged.patched(case.model, max_batch_tokens=chunk):
        case.check(case.generate_batch())


@pytest.mark.slow
def test_smollm2_alone_then_warm(smollm2_case):
    with hfpaged.patched(smollm2_case.model):
        for _ in range(2):
            smollm2_case.check(
                [alone(smollm2_case.model, prompt, max_new_tokens=64, **ENDLESS) for prompt in smollm2_case.prompts]
            )
        assert counters(smollm2_case)["cached_prompt_tokens"] >= sum(
            (len(prompt) - 1) // BLOCK * BLOCK for prompt in smollm2_case.prompts
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_smollm2_preempted_by(smollm2_case, kind):
    with hfpaged.patched(smollm2_case.model, num_blocks=100, preemption=kind):
        smollm2_case.check(smollm2_case.generate_batch())
        assert counters(smollm2_case)[f"preemptions_{kind}"] > 0


@pytest.mark.slow
def test_smollm2_eight_threads(smollm2_case):
    def user(index):
        return [
            alone(smollm2_case.model, prompt, max_new_tokens=64, **ENDLESS) for prompt in smollm2_case.prompts[index::8]
        ]

    with hfpaged.patched(smollm2_case.model), ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(user, range(8)))
    smollm2_case.check([texts[index % 8][index // 8] for index in range(32)])

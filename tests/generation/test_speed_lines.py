"""What generation must reach on SmolLM2. Slow, and the speeds mean something on an idle machine only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine.hooks import after_each_step, used_blocks
from quiet import torch_threads
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hfpaged

pytestmark = pytest.mark.slow

TOPICS = (
    "the sea", "a small dog", "winter in Oslo", "old trains", "bread", "the moon", "chess", "a lost key",
    "rivers", "music", "a red door", "bees", "paper", "the desert", "clocks", "rain",
)  # fmt: skip
TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening. He lit the lamp, checked the lens for dust, "
    "and wrote the weather into a thick blue book. Ships passed far out on the grey water, and sometimes one of them "
    "answered with three short blasts of its horn. In winter the stairs were cold and the wind sang in the railing, "
    "but he never missed a night. When he grew tired he read old letters from his sister, who lived in a city."
)
GREEDY = {"do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture
def model(smollm2_path: Path) -> Iterator[PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    yield model
    hfpaged.unpatch(model)


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def best_of_turns(calls: list[Callable[[], Any]], turns: int = 3) -> list[float]:
    """The least seconds of each call, in turn, so that what disturbs the machine disturbs all."""
    times = [[seconds(call) for call in calls] for _ in range(turns)]
    return [min(each) for each in zip(*times, strict=True)]


@pytest.mark.parametrize("sentences", [0, 1, 5])
def test_four_beams_on_sixteen_prompts_are_twice_as_fast_as_stock(model, tokenizer, sentences):
    prompts = [
        f"Write a short story about {topic}. " + f"Say something about {topic}, then something else. " * sentences
        for topic in TOPICS
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    options = {**GREEDY, "num_beams": 4, "return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 16}
    outputs = []
    stock = seconds(lambda: outputs.append(model.generate(**batch, **options)))
    model.patch(prefix_caching=False)
    model.generate(**batch, **{**options, "max_new_tokens": 2})
    paged = min(seconds(lambda: outputs.append(model.generate(**batch, **options))) for _ in range(2))
    print(f"4 beams x 16 prompts of {batch.input_ids.shape[1]} tokens: stock {stock:.2f} s, patched {paged:.2f} s")
    assert torch.equal(outputs[1].sequences, outputs[0].sequences)
    torch.testing.assert_close(outputs[1].sequences_scores, outputs[0].sequences_scores, atol=1e-4, rtol=0)
    assert stock >= 2 * paged


def test_four_beams_hold_little_more_than_one(model, tokenizer):
    ids = tokenizer(TEXT * 8, return_tensors="pt").input_ids[:, :700]
    model.patch(prefix_caching=False)
    most = {}
    engine = hfpaged.engine(model)
    for beams in (1, 4):
        with after_each_step(engine, lambda: used_blocks(engine)) as held:
            model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, max_new_tokens=24, **GREEDY)
        most[beams] = max(held)
    print(f"most blocks held, by beams: {most}")
    assert most[4] <= 1.3 * most[1]


@pytest.mark.parametrize("rows, least", [(1, 1.8), (16, 0.95)])
def test_prompt_lookup_on_a_text_to_copy(model, tokenizer, rows, least):
    chat = [{"role": "user", "content": f"Repeat this text exactly, word by word:\n\n{TEXT}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + TEXT[:67]
    check_lookup(model, tokenizer([prompt] * rows, return_tensors="pt"), least)


def test_prompt_lookup_on_sixteen_texts_with_nothing_to_copy(model, tokenizer):
    prompts = [f"Write a story about {topic}." for topic in TOPICS]
    check_lookup(model, tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left"), 0.95)


def check_lookup(model, batch, least):
    """Equal tokens, and at least so many times the tokens per second of plain decoding."""
    model.patch()
    outputs = {}

    def run(name, **options):
        outputs[name] = model.generate(**batch, max_new_tokens=64, **GREEDY, **options)

    run("warm")
    plain, lookup = best_of_turns([lambda: run("plain"), lambda: run("lookup", prompt_lookup_num_tokens=10)])
    print(f"{len(batch.input_ids)} rows: plain {plain:.2f} s, prompt lookup {lookup:.2f} s")
    assert torch.equal(outputs["lookup"], outputs["plain"])
    assert plain >= least * lookup


def run_agent(model, tokenizer, text, at_turn=lambda turn: None):
    """Fifty turns: every turn's prompt is all that came before."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    observation = tokenizer("\nObservation: nothing new.\nThought:", return_tensors="pt").input_ids
    for turn in range(50):
        at_turn(turn)
        ids = torch.cat([ids, observation], dim=1)
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, stop_strings=["\nObservation", "</tool>"],
            tokenizer=tokenizer, **GREEDY,
        )  # fmt: skip


def test_an_agent_computes_nothing_again_and_its_stop_strings_cost_little(model, tokenizer):
    model.patch(num_blocks=80)
    engine = hfpaged.engine(model)
    stop_seconds, before = [0.0], {}

    def begin_to_measure(turn):
        if turn == 10:
            time_stops(engine, stop_seconds)
            before.update(engine.stats())

    run_agent(model, tokenizer, TEXT, begin_to_measure)
    spent = {name: value - before[name] for name, value in engine.stats().items() if isinstance(value, (int, float))}
    hits = spent["cached_prompt_tokens"] / spent["prompt_tokens"]
    share = stop_seconds[0] / sum(spent[name] for name in ("seconds_forward", "seconds_sample", "seconds_schedule"))
    print(f"hits {hits:.3f}, stop strings {share:.2%} of a step")
    assert hits > 0.9
    assert share < 0.03
    engine.check()


def test_the_memory_of_agents_is_flat(model, tokenizer):
    """The system commits the pool's memory as the first agent reaches new blocks; the others find it there."""
    model.patch(num_blocks=80)
    process, memory = psutil.Process(), []
    for name in ("Ann", "Ben", "Cem"):
        run_agent(model, tokenizer, f"{name} writes. {TEXT}")
        memory.append(process.memory_info().rss / 2**20)
    print(f"memory after each agent, MiB: {[round(one, 1) for one in memory]}")
    assert memory[2] - memory[0] < 8
    hfpaged.engine(model).check()


def time_stops(engine, spent):
    """Add the seconds of every check for the end of texts to spent[0]."""
    stops = engine._stepper._stops
    finished = stops.finished

    def timed(rows):
        began = time.perf_counter()
        try:
            return finished(rows)
        finally:
            spent[0] += time.perf_counter() - began

    stops.finished = timed

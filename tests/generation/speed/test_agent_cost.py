"""An agent whose prompt grows by every turn: its prefix is cached, its stop strings cost little, its memory is flat."""

from __future__ import annotations

import time

import psutil
import pytest
import torch
from generation.speed.workload import GREEDY, TEXT

import hfpaged
from hfpaged.sampling.stop import StopChecker

pytestmark = pytest.mark.slow


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


def test_an_agent_computes_nothing_again_and_its_stop_strings_cost_little(model, tokenizer, monkeypatch):
    model.patch(num_blocks=80)
    engine = hfpaged.engine(model)
    stop_seconds, before = [0.0], {}

    def begin_to_measure(turn):
        if turn == 10:
            time_stops(monkeypatch, stop_seconds)
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


def time_stops(monkeypatch, spent):
    """Add the seconds of every check for the end of texts to spent[0]."""
    finished = StopChecker.finished

    def timed(checker, rows):
        began = time.perf_counter()
        try:
            return finished(checker, rows)
        finally:
            spent[0] += time.perf_counter() - began

    monkeypatch.setattr(StopChecker, "finished", timed)

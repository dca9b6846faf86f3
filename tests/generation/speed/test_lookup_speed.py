"""Prompt lookup: nearly twice as fast where there is something to copy, and no loss where there is nothing."""

from __future__ import annotations

import pytest
import torch
from generation.speed.workload import GREEDY, TEXT, TOPICS, batch_of, best_of_turns, chat_prompt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows, least", [(1, 1.8), (16, 0.95)])
def test_prompt_lookup_on_a_text_to_copy(model, tokenizer, rows, least):
    prompt = chat_prompt(tokenizer, f"Repeat this text exactly, word by word:\n\n{TEXT}") + TEXT[:67]
    check_lookup(model, batch_of(tokenizer, [prompt] * rows), least)


def test_prompt_lookup_on_sixteen_texts_with_nothing_to_copy(model, tokenizer):
    check_lookup(model, batch_of(tokenizer, [f"Write a story about {topic}." for topic in TOPICS]), 0.95)


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

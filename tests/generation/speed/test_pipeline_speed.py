"""A list of prompts through a patched pipeline: nearly as fast as the engine by itself."""

from __future__ import annotations

import pytest
from generation.speed.workload import GREEDY, TOPICS, best_of_turns
from transformers import pipeline

import hfpaged

pytestmark = pytest.mark.slow


def test_a_hundred_prompts_take_the_engines_own_time(model, tokenizer):
    prompts = [f"Write story number {number} about {TOPICS[number % 16]}." for number in range(100)]
    pipe = hfpaged.patch(pipeline("text-generation", model=model, tokenizer=tokenizer))
    engine, texts = hfpaged.engine(model), {}
    options = {**GREEDY, "max_new_tokens": 32}

    def through_engine():
        engine.reset_prefix_cache()
        handles = [engine.submit(tokenizer(prompt)["input_ids"], **options) for prompt in prompts]
        texts["engine"] = [tokenizer.decode(handle.result(), skip_special_tokens=True) for handle in handles]

    def through_pipeline():
        engine.reset_prefix_cache()
        results = pipe(prompts, return_full_text=False, **options)
        texts["pipeline"] = [result[0]["generated_text"] for result in results]

    through_engine()
    alone, piped = best_of_turns([through_engine, through_pipeline], turns=2)
    print(f"100 prompts, 32 new tokens each: engine {alone:.2f} s, pipeline {piped:.2f} s")
    assert texts["pipeline"] == texts["engine"]
    assert piped <= 1.1 * alone

"""Classifier-free guidance, whose second forward runs on the engine."""

from __future__ import annotations

import pytest
import torch
from generation.speed.workload import GREEDY, TOPICS, batch_of, seconds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", [1, 8])
def test_guidance_is_twice_as_fast_as_stock(model, tokenizer, rows):
    batch, texts = batch_of(tokenizer, [f"Write a story about {topic}." for topic in TOPICS[:rows]]), []

    def run():
        texts.append(model.generate(**batch, max_new_tokens=32, guidance_scale=1.5, **GREEDY))

    stock = seconds(run)
    model.patch()
    run()
    paged = min(seconds(run) for _ in range(2))
    print(f"guidance, {rows} rows: stock {stock:.2f} s, patched {paged:.2f} s")
    assert torch.equal(texts[-1], texts[0])
    assert stock >= 2 * paged

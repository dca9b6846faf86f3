"""Rows of one padded call of the engine, against stock on each prompt alone."""

from __future__ import annotations

import torch
from batches import alone, left_padded, padded_rows, random_prompts
from families import BOS, PAD
from transformers import LogitsProcessor

PROMPTS = [[BOS], *random_prompts((4, 9, 16, 17))]
WIDTH = 17
NEW = 10
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


def assert_rows_equal_stock_alone(pair, batch_options, row_options=None, prompts=PROMPTS):
    """Rows of one padded call of the engine, against stock on each prompt alone. Returns the texts."""
    want = [alone(pair.stock, prompt, **(row_options or batch_options)) for prompt in prompts]
    out = pair.paged.generate(**left_padded(prompts), **batch_options)
    assert out.dtype == torch.long
    assert out.tolist() == padded_rows(prompts, want, batch_options.get("pad_token_id", PAD)).tolist()
    return want


def assert_close(got, want):
    """Equal up to float32 rounding, and excluded (-inf) in the same places."""
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Unchanged(LogitsProcessor):
    """A user's own processor, which puts its call in lockstep."""

    def __call__(self, input_ids, scores):
        return scores

"""A patched model held against the oracle: a fresh, unpatched copy of it as it is now, given one prompt at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from batches import Prompt, alone, left_padded, new_tokens, random_prompts
from excuse import assert_same_greedy_text

import hfpaged

GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
# Two full blocks, one that begins alike, and less than a block.
PROMPTS = random_prompts((37, 20, 5), common_prefix=16)
NEW = 6


def greedy(model: Any, prompts: Sequence[Prompt] = PROMPTS, num_new: int = NEW) -> list[list[int]]:
    """The new tokens of one padded call."""
    out = model.generate(**left_padded(prompts), max_new_tokens=num_new, **GREEDY)
    return new_tokens(out, prompts)


def stats(model: Any) -> dict[str, Any]:
    """`engine.stats()` of a patched model, or of what it wraps."""
    return hfpaged.engine(model).stats()


def assert_stock_text(model: Any, prompts: Sequence[Prompt] = PROMPTS, num_new: int = NEW) -> list[list[int]]:
    """Generate on the engine, which must take the call, and compare each row with a fresh copy's. Returns the texts."""
    before = stats(model)["fallbacks"]
    texts = greedy(model, prompts, num_new)
    assert stats(model)["fallbacks"] == before
    fresh = copy.deepcopy(model)
    for prompt, text in zip(prompts, texts, strict=True):
        assert_same_greedy_text(fresh, prompt, text, alone(fresh, prompt, max_new_tokens=num_new, **GREEDY))
    return texts


def warm_up(model: Any) -> list[list[int]]:
    """Generate until the prompts' blocks are cached, and show that they are. Returns the texts."""
    greedy(model)
    before = stats(model)["cached_prompt_tokens"]
    texts = greedy(model)
    assert stats(model)["cached_prompt_tokens"] >= before + 32
    return texts

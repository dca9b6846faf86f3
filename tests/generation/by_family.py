"""The same calls on the families that Transformers tests most, stock and patched: which, and what both say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batches import Prompt, left_padded
from families import PAD
from generation.conftest import Pair
from transformers import PreTrainedModel

import hfpaged

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [20, 21, 22], [40 + index % 7 for index in range(19)]]
NEW = 12
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}


def both(pair: Pair, prompts: list[Prompt] = PROMPTS, **options: Any) -> list[Any]:
    """Outputs of stock and of patched for the same call and seed."""
    outputs = []
    for model in pair:
        torch.manual_seed(3)
        outputs.append(model.generate(**left_padded(prompts), **{**OPTIONS, **options}))
    return outputs


def fallbacks_of(model: PreTrainedModel, call: Callable[[], Any]) -> dict[str, int]:
    """Which fallbacks `call` counted."""
    before = dict(hfpaged.engine(model).stats()["fallbacks"])
    call()
    after = hfpaged.engine(model).stats()["fallbacks"]
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

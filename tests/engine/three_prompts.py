"""Three prompts with a common beginning, their greedy texts, and the autocast that tests run them under."""

from __future__ import annotations

import torch
from batches import left_padded, new_tokens, random_prompts

PROMPTS = random_prompts((20, 5, 33), common_prefix=5)
GREEDY = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 12}


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def texts(model):
    return new_tokens(model.generate(**left_padded(PROMPTS), **GREEDY), PROMPTS)

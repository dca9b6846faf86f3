"""Prompts, the padded batches made of them, and what stock generate() gives each of them alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from families import PAD, VOCAB_SIZE
from transformers import PreTrainedModel

Prompt = list[int]


def random_prompts(lengths: Sequence[int], seed: int = 0, common_prefix: int = 0) -> list[Prompt]:
    """Prompts of the given lengths without special tokens; those that are long enough begin alike."""
    source = random.Random(seed)
    prefix = [source.randrange(3, VOCAB_SIZE) for _ in range(common_prefix)]
    texts = [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [prefix + text[len(prefix) :] if len(text) > len(prefix) else text for text in texts]


def left_padded(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a batch, as a tokenizer with padding_side="left" gives them."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


def new_tokens(sequences: torch.Tensor, prompts: Sequence[Prompt]) -> list[list[int]]:
    """What follows the padded prompts, row by row."""
    return sequences[:, max(map(len, prompts)) :].tolist()


def alone(model: PreTrainedModel, prompt: Prompt, **options: Any) -> list[int]:
    """The new tokens of one call with this one prompt, unpadded."""
    return model.generate(**left_padded([prompt]), **options)[0, len(prompt) :].tolist()


def padded_rows(prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], pad: int = PAD) -> torch.Tensor:
    """The `sequences` of a batch whose rows got these new tokens: padded on both sides."""
    steps = max(map(len, texts))
    ids = left_padded(prompts)["input_ids"].tolist()
    return torch.tensor([row + list(text) + [pad] * (steps - len(text)) for row, text in zip(ids, texts, strict=True)])

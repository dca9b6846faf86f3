"""Prompts: token ids out of whatever a caller has, refused where nothing can be generated from them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from hfpaged.errors import InputError


def mask_is_left_padding(mask: torch.Tensor) -> bool:
    """Whether every row of a [B, L] mask is zeros, then ones up to its end."""
    ones = mask != 0
    return bool(ones[:, -1].all() and (ones[:, 1:] >= ones[:, :-1]).all())


def require_no_empty_row(mask: torch.Tensor) -> None:
    """Raise `InputError` if a row of a [B, L] mask has no token at all."""
    empty = (mask == 0).all(-1).nonzero()[:, 0].tolist()
    if empty:
        raise InputError(f"row {empty[0]} has no tokens (its attention mask is all zero)")


def token_ids(prompt: Iterable[Any]) -> list[int]:
    """A prompt from whatever holds integers: a list, a NumPy array, a [L] tensor.

    Raises:
        InputError: something in it is not an integer.
    """
    try:
        return list(map(int, map(operator.index, prompt)))
    except TypeError as error:
        raise InputError(f"a prompt is a sequence of integer token ids: {error}") from None


def unpadded(input_ids: torch.LongTensor, mask: torch.Tensor | None, vocab_size: int) -> list[list[int]]:
    """Token ids of each row without its left padding.

    Raises:
        InputError: no prompt or an empty one, ids that are no integers or outside the vocabulary, a mask of another
            shape, or a row that is all padding.
    """
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise InputError(f"a prompt needs at least one token; input_ids has shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point():
        raise InputError(f"input_ids must be integers, not {input_ids.dtype}")
    if mask is not None and mask.shape != input_ids.shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}")
    if mask is not None:
        require_no_empty_row(mask)
    lengths = [input_ids.shape[1]] * input_ids.shape[0] if mask is None else (mask != 0).sum(-1).tolist()
    rows = [row[len(row) - length :] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
    for index, row in enumerate(rows):
        check_prompt(row, vocab_size, f"row {index}")
    return rows


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    embeddings = model.get_input_embeddings()
    # One with an adapter around it has only the weight.
    return getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]


def check_prompt(prompt: list[int], vocab_size: int, name: str = "the prompt") -> None:
    """Raise `InputError` unless `prompt` has at least one token, all of them in the vocabulary."""
    if not prompt:
        raise InputError(f"{name} has no tokens")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InputError(f"{name} has token id {wrong}, outside the vocabulary of {vocab_size}")


def output_size(model: PreTrainedModel) -> int:
    """How many token ids can come out of the model."""
    head = model.get_output_embeddings()
    return getattr(head, "out_features", None) or head.weight.shape[0]


def check_bias(logit_bias: dict[int, float] | None, model: PreTrainedModel) -> None:
    """Raise `InputError` unless the model can produce every token id that has a bias."""
    if logit_bias and max(logit_bias) >= output_size(model):
        raise InputError(f"logit_bias has token id {max(logit_bias)}, outside the vocabulary of {output_size(model)}")

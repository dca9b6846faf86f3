"""Log-probabilities of chosen tokens, and of the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Rows at a time, so that the float32 copy of a long prompt's logits stays small.
_ROWS = 64


class TokenLogprob(NamedTuple):
    """How likely the model found one token of a text, before any processor, temperature or truncation.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability: log_softmax of the raw logits, in float32.
        rank: 1 for the likeliest token of the vocabulary; tied tokens share the better rank.
        top: (id, log-probability) of as many of the likeliest tokens as were asked for, likeliest first. The token
            itself is among them only if it is that likely.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of `tokens`, each under its row of `logits`.

    Args:
        logits: [N, V] of any floating dtype, on any device.
        tokens: N ids.
        top: how many of the likeliest tokens to name, one number a row; more than V name all.
    """
    found: list[TokenLogprob] = []
    for first in range(0, len(tokens), _ROWS):
        rows = slice(first, first + _ROWS)
        found += _few(logits[rows], tokens[rows], top[rows])
    return found


def _few(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    scores = logits.to(torch.float32).log_softmax(-1)
    ids = torch.tensor(tokens, device=scores.device).unsqueeze(1)
    chosen = scores.gather(1, ids)
    ranks = (scores > chosen).sum(-1) + 1
    best = scores.topk(min(max(top), scores.shape[1]), dim=-1)
    columns = (tokens, chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), top)
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, logprob, rank, top_ids, top_values, count in zip(*columns, strict=True)
    ]

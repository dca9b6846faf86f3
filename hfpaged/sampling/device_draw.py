"""Drawing tokens where the logits are, without the host waiting for them: what most rows ask for, and no more.

The scores go through the numbers of `stages`, and the token is drawn with the same random number as `Sampler` would
draw it, so that it does not matter which of the two draws. What work there is depends on nothing but shapes, so that it
can be captured: a filter leaves the scores of a row that does not use it as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfpaged.sampling.distribution import drawn_indices
from hfpaged.sampling.draw_table import IS_SAMPLED, MIN_P, REST, TEMPERATURE, TOP_K, UNIFORM
from hfpaged.sampling.stages import EXCLUDED, in_rest


def draw_on_device(logits: Tensor, argmax: Tensor, numbers: Tensor) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [N, V] of any floating dtype; not modified.
        argmax: int64 [N], the tokens of rows that are not sampled.
        numbers: float64 [NUM_NUMBERS, N] as in `DrawTable`, on the device of `logits`.

    Returns:
        int64 [N]; -1 where the scores of a sampled row have NaN or +inf.
    """
    scores = logits.to(torch.float32, copy=True)
    _divide(scores, _column(numbers[TEMPERATURE], scores))
    _keep_top(scores, numbers[TOP_K].long().unsqueeze(1), _column(numbers[REST], scores))
    probabilities = scores.softmax(dim=-1)
    threshold = _column(numbers[MIN_P], scores) * probabilities.amax(dim=-1, keepdim=True)
    scores.masked_fill_(probabilities < threshold, EXCLUDED)
    return torch.where(numbers[IS_SAMPLED] > 0, drawn_indices(scores, numbers[UNIFORM]), argmax)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).unsqueeze(1)


def _divide(scores: Tensor, temperature: Tensor) -> None:
    if scores.device.type == "cuda":
        # As stock divides there by a number: through the reciprocal.
        scores.mul_(temperature.reciprocal())
    else:
        scores.div_(temperature)


def _keep_top(scores: Tensor, top_k: Tensor, rest: Tensor) -> None:
    """Top-k, then top-p among what that leaves: `TopK` and `TopP`, from one sort."""
    ascending, index = scores.sort(stable=True)
    kth = ascending.gather(1, (scores.shape[1] - top_k).clamp_min(0).masked_fill(top_k == 0, 0))
    # Equal scores all stay.
    below = ascending < kth
    ascending.masked_fill_(below, EXCLUDED)
    remove = in_rest(ascending, rest).logical_or_(below)
    scores.masked_fill_(remove.scatter(1, index, remove), EXCLUDED)

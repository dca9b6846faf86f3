"""Drawing tokens where the logits are, without the host waiting for them: what most rows ask for, and no more.

The scores go through the numbers of `stages`, and the token is drawn with the same random number as `Sampler` would
draw it, so that it does not matter which of the two draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hfpaged.sampling.distribution import drawn_indices
from hfpaged.sampling.sampler import SampleRow, keyed_uniforms
from hfpaged.sampling.stages import EXCLUDED, MinP, Temperature, TopK, TopP

_KNOWN = (Temperature, TopK, TopP, MinP)
_KEEPS_ALL = -1.0


class DrawSettings(NamedTuple):
    """How one row's token is drawn.

    Attributes:
        temperature, top_k, top_p, min_p: as in Transformers; None: the row has no such processor.
        is_argmax: none of them matters, the likeliest token is taken.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    is_argmax: bool = False

    @classmethod
    def of(cls, row: SampleRow) -> DrawSettings | None:
        """Of a row; None if its scores take more than this, or are wanted themselves."""
        if row.keep_scores:
            return None
        if row.is_argmax:
            return cls(is_argmax=True)
        stages = row.processors.stages if row.processors is not None else ()
        orders = [stage.order for stage in stages if type(stage) in _KNOWN]
        if not row.do_sample or len(orders) < len(stages) or orders != sorted(set(orders)):
            return None
        return cls(
            next((stage.temperature for stage in stages if type(stage) is Temperature), None),
            next((stage.top_k for stage in stages if type(stage) is TopK), None),
            next((stage.top_p for stage in stages if type(stage) is TopP), None),
            next((stage.min_p for stage in stages if type(stage) is MinP), None),
        )


class DrawTable(NamedTuple):
    """The settings of N sampled rows as arrays.

    Attributes:
        numbers: float64 [4 * N]: temperatures, 1 - top_p, min_p, and each row's random number.
        top_k: int64 [N]; 0: no such processor.
        largest_top_k: of any row; 0: none has one.
        has_top_p, has_min_p: whether any row has one.
    """

    numbers: np.ndarray
    top_k: np.ndarray
    largest_top_k: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, settings: Sequence[DrawSettings], rows: Sequence[SampleRow], positions: Sequence[int]) -> DrawTable:
        """Lay the settings out.

        Args:
            rows: whose seeds to use.
            positions: of the tokens to draw, in their sequences.
        """
        uniforms = keyed_uniforms([row.seed for row in rows], [row.sample_index for row in rows], positions)
        columns = (
            [1.0 if one.temperature is None else one.temperature for one in settings],
            [_KEEPS_ALL if one.top_p is None else 1 - one.top_p for one in settings],
            [one.min_p or 0.0 for one in settings],
        )
        top_k = np.array([one.top_k or 0 for one in settings], dtype=np.int64)
        return cls(
            np.concatenate([*(np.array(column, dtype=np.float64) for column in columns), uniforms]),
            top_k,
            int(top_k.max(initial=0)),
            any(one.top_p is not None for one in settings),
            any(one.min_p for one in settings),
        )


def draw_on_device(scores: Tensor, table: DrawTable, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Draw one token a row.

    Args:
        scores: float32 [N, V], overwritten.
        table: of the rows; only what shapes the work is read here.
        numbers, top_k: its arrays on the device of `scores`.

    Returns:
        int64 [N]; -1 where the scores have NaN or +inf.
    """
    temperature, top_p_rest, min_p, uniforms = numbers.view(4, -1)
    _divide(scores, temperature.to(scores.dtype).unsqueeze(1))
    if table.largest_top_k:
        _keep_top_k(scores, top_k.unsqueeze(1), min(table.largest_top_k, scores.shape[1]))
    if table.has_top_p:
        _keep_top_p(scores, top_p_rest.to(scores.dtype).unsqueeze(1))
    if table.has_min_p:
        probabilities = scores.softmax(dim=-1)
        threshold = min_p.to(scores.dtype).unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
        scores.masked_fill_(probabilities < threshold, EXCLUDED)
    return drawn_indices(scores, uniforms)


def _divide(scores: Tensor, temperature: Tensor) -> None:
    if scores.device.type == "cuda":
        # As stock divides there by a number: through the reciprocal.
        scores.mul_(temperature.reciprocal())
    else:
        scores.div_(temperature)


def _keep_top_k(scores: Tensor, top_k: Tensor, largest: int) -> None:
    last = (top_k - 1).clamp(0, largest - 1)
    threshold = scores.topk(largest).values.gather(1, last).masked_fill(top_k == 0, EXCLUDED)
    scores.masked_fill_(scores < threshold, EXCLUDED)


def _keep_top_p(scores: Tensor, rest: Tensor) -> None:
    ascending, index = scores.sort(stable=True)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= rest
    remove[:, -1] = False
    scores.masked_fill_(remove.scatter(1, index, remove), EXCLUDED)

"""The steps a row's scores go through, each with the numbers of stock's own logits processors.

Every stage edits its rows of one float32 matrix in place. A batched stage does so for many rows, each with its own
parameter, at once; a row stage takes one row and may look at that row's tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

History = npt.NDArray[np.int64]
EXCLUDED = -float("inf")


class BatchedStage(ABC):
    """A stage without history. `order` is its place in the list that Transformers builds."""

    order: int

    @classmethod
    @abstractmethod
    def apply(cls, scores: Tensor, rows: Sequence[int], stages: Sequence[Any]) -> None:
        """Edit `rows` of scores, float32[P, V], in place; `stages` are those rows' instances of this class."""


class RowStage(ABC):
    """A stage that runs row by row."""

    @abstractmethod
    def apply(self, scores: Tensor, history: History) -> None:
        """Edit scores, float32[1, V], in place, given the row's tokens, int64[L]."""


def _edit_rows(scores: Tensor, rows: Sequence[int], edit: Callable[[Tensor], object]) -> None:
    """Apply an in-place edit to some rows, without copying when they are all of them."""
    if len(rows) == len(scores):
        edit(scores)
        return
    index = torch.tensor(rows, device=scores.device)
    part = scores[index]
    edit(part)
    scores[index] = part


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Temperature(BatchedStage):
    """TemperatureLogitsWarper: scores / temperature."""

    temperature: float
    order = 0

    @classmethod
    def apply(cls, scores: Tensor, rows: Sequence[int], stages: Sequence[Temperature]) -> None:
        groups: dict[float, list[int]] = {}
        for row, stage in zip(rows, stages, strict=True):
            groups.setdefault(stage.temperature, []).append(row)
        # By Python scalar, as stock does: on CUDA a scalar division is a multiplication by the reciprocal, which a
        # division by a tensor is not.
        for temperature, group in groups.items():
            _edit_rows(scores, group, lambda part, divisor=temperature: part.div_(divisor))


@dataclass(frozen=True, slots=True)
class TopK(BatchedStage):
    """TopKLogitsWarper: scores below the k-th highest are excluded; scores equal to it all stay."""

    top_k: int
    order = 1

    @classmethod
    def apply(cls, scores: Tensor, rows: Sequence[int], stages: Sequence[TopK]) -> None:
        counts = [min(stage.top_k, scores.shape[1]) for stage in stages]

        def edit(part: Tensor) -> None:
            last = torch.tensor(counts, device=part.device).unsqueeze(1) - 1
            threshold = part.topk(max(counts)).values.gather(1, last)
            part.masked_fill_(part < threshold, EXCLUDED)

        _edit_rows(scores, rows, edit)


@dataclass(frozen=True, slots=True)
class TopP(BatchedStage):
    """TopPLogitsWarper: the least likely tokens that together have at most 1 - top_p are excluded.

    Which of several exactly equal scores stay when the cut falls among them is unspecified in stock, whose sort is not
    stable. Here it is those with the highest ids.
    """

    top_p: float
    order = 2

    @classmethod
    def apply(cls, scores: Tensor, rows: Sequence[int], stages: Sequence[TopP]) -> None:
        def edit(part: Tensor) -> None:
            rest = _column([1 - stage.top_p for stage in stages], part)
            if part.device.type == "cpu":
                _exclude_rest(part, rest)
                return
            ascending, index = part.sort(stable=True)
            remove = in_rest(ascending, rest)
            part.masked_fill_(remove.scatter(1, index, remove), EXCLUDED)

        _edit_rows(scores, rows, edit)


def in_rest(ascending: Tensor, rest: Tensor) -> Tensor:
    """bool[N, V]: the least likely tokens, as many as have at most the mass `rest`, float32[N, 1], together.

    What it does depends on shapes alone, so that it can be captured.
    """
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= rest
    remove.narrow(1, -1, 1).fill_(False)
    return remove


def _exclude_rest(scores: Tensor, rest: Tensor) -> None:
    """Exclude these tokens in place, on a CPU, where NumPy sorts several times as fast if it need not sort indices."""
    ascending = torch.from_numpy(np.sort(scores.numpy(), axis=1))
    counts = in_rest(ascending, rest).sum(dim=1, keepdim=True)
    least = ascending.gather(1, counts)
    # As a stable sort puts them, the first of equal scores are the least.
    equal_ones = (counts - (ascending < least).sum(dim=1, keepdim=True))[:, 0].tolist()
    for row, (threshold, count) in enumerate(zip(least, equal_ones, strict=True)):
        if count > 0:
            scores[row, (scores[row] == threshold).nonzero()[:count, 0]] = EXCLUDED
    scores.masked_fill_(scores < least, EXCLUDED)


@dataclass(frozen=True, slots=True)
class MinP(BatchedStage):
    """MinPLogitsWarper: tokens less likely than min_p times the most likely one are excluded."""

    min_p: float
    order = 3

    @classmethod
    def apply(cls, scores: Tensor, rows: Sequence[int], stages: Sequence[MinP]) -> None:
        def edit(part: Tensor) -> None:
            probabilities = part.softmax(dim=-1)
            highest = probabilities.amax(dim=-1, keepdim=True)
            part.masked_fill_(probabilities < _column([stage.min_p for stage in stages], part) * highest, EXCLUDED)

        _edit_rows(scores, rows, edit)


@dataclass(frozen=True, slots=True)
class RepetitionPenalty(RowStage):
    """RepetitionPenaltyLogitsProcessor: tokens seen after the first `skip` ones become less likely."""

    penalty: float
    skip: int

    def apply(self, scores: Tensor, history: History) -> None:
        seen = torch.from_numpy(history[self.skip :])
        if seen.numel() == 0:
            return
        # An embedding may know more tokens than the head can produce.
        seen = seen[seen < scores.shape[1]].to(scores.device)
        values = scores[0, seen]
        scores[0, seen] = torch.where(values < 0, values * self.penalty, values / self.penalty)


@dataclass(frozen=True, slots=True)
class ExcludeTokens(RowStage):
    """Tokens that are excluded while the sequence has from `first_length` to below `end_length` tokens.

    Covers MinLength, MinNewTokensLength, SuppressTokens and SuppressTokensAtBegin.
    """

    token_ids: tuple[int, ...]
    first_length: int
    end_length: float

    def apply(self, scores: Tensor, history: History) -> None:
        if self.first_length <= len(history) < self.end_length:
            scores[0, [token for token in self.token_ids if token < scores.shape[1]]] = EXCLUDED


@dataclass(frozen=True, slots=True)
class StockProcessor(RowStage):
    """Any other logits processor, called as stock calls it for this row alone."""

    processor: Callable[[Tensor, Tensor], Tensor]

    def apply(self, scores: Tensor, history: History) -> None:
        input_ids = torch.from_numpy(history).unsqueeze(0).to(scores.device)
        scores.copy_(self.processor(input_ids, scores))

"""Top-k, top-p and min-p on the few tokens that can survive them, instead of sorting the whole vocabulary.

The result is the set of tokens that the full stages keep, as far as float32 rounding does not decide: tokens that it
decides about are doubtful, and a row with too many of them is uncertain and must go through the full stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.sampling.distribution import in_chunks
from hfpaged.sampling.nucleus import least_score, nucleus
from hfpaged.sampling.stages import EXCLUDED, BatchedStage, MinP, TopK, TopP

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Reaching = tuple[Ids, Scores]

# Everything here is computed on the host, whatever the default device.
_HOST = torch.device("cpu")
# A row with more tokens tied at the k-th score than this much over k is left to the full stages.
_MOST_TIES = 4096
_LARGEST_BLOCK = 64
# How far stock's float32 arithmetic may be from exact, relatively, in the ratio of two probabilities. The largest error
# seen is 2e-6, on vocabularies of 50,000 and 150,000 tokens.
_RATIO_TOLERANCE = 1e-5
# Below this, float32 probabilities are too close to the smallest normal number for the ratio's bound.
_SMALLEST_MIN_P = 1e-20


@dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters of a trailing top-k, top-p and min-p; None where the list has no such stage."""

    top_k: int | None
    top_p: float | None
    min_p: float | None

    @classmethod
    def from_stages(cls, stages: Sequence[BatchedStage]) -> Truncation | None:
        """What these trailing stages do, or None if they cannot run on candidates."""
        top_k = next((stage.top_k for stage in stages if type(stage) is TopK), None)
        top_p = next((stage.top_p for stage in stages if type(stage) is TopP), None)
        min_p = next((stage.min_p for stage in stages if type(stage) is MinP), None)
        if top_k is None and top_p is None:
            return None
        if min_p is not None and 0 < min_p < _SMALLEST_MIN_P:
            return None
        return cls(top_k, top_p, min_p)

    @property
    def candidate_count(self) -> int:
        """How many of the likeliest tokens are looked at, at least."""
        return self.top_k if self.top_k is not None else 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """The surviving tokens of N rows, on the CPU.

    Attributes:
        ids: int64[N, W], ascending token ids, then padding.
        scores: float32[N, W], their scores; -inf in the padding.
        uncertain: bool[N], rows whose scores here must not be used.
        doubtful: by row, the columns of tokens that the full stages may not keep, the least likely first. They keep
            none without all that come after it.
    """

    ids: Tensor
    scores: Tensor
    uncertain: list[bool]
    doubtful: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class _Survivors:
    """What is left of one row: W ids in ascending order, their scores, and which of them are doubtful."""

    ids: Ids
    scores: Scores
    doubtful: Mask

    def where(self, kept: Mask) -> _Survivors:
        """Those of them that are `kept`, bool[W]."""
        # Several times as fast as indexing by the mask.
        places = kept.nonzero()[0]
        return _Survivors(self.ids[places], self.scores[places], self.doubtful[places])

    def doubtful_columns(self) -> list[int]:
        """Places of the doubtful ones, the least likely first; equal ones in the order in which stages drop them."""
        columns = np.flatnonzero(self.doubtful)
        return columns[np.argsort(self.scores[columns], kind="stable")].tolist()


def truncate(scores: Tensor, truncations: Sequence[Truncation]) -> Candidates:
    """Apply each row's truncation.

    Args:
        scores: float32[N, V], not modified. A row with NaN has no surviving tokens.
        truncations: one a row.
    """
    bounds = torch.empty(len(scores), 1, dtype=torch.float32, device=scores.device)
    totals = [0.0] * len(scores)
    by_rank = [row for row, truncation in enumerate(truncations) if truncation.top_k is not None]
    by_mass = [row for row, truncation in enumerate(truncations) if truncation.top_k is None]
    if by_rank:
        counts = [min(truncations[row].top_k, scores.shape[1]) for row in by_rank]
        bounds[by_rank] = _bounds_by_rank(_rows(scores, by_rank), counts)
    if by_mass:
        bounds[by_mass], masses = _bounds_by_mass(_rows(scores, by_mass), [truncations[row].top_p for row in by_mass])
        for row, mass in zip(by_mass, masses, strict=True):
            totals[row] = mass
    reaching = reaching_by_row if scores.device.type == "cpu" else reaching_by_mask
    rows = zip(reaching(scores, bounds), truncations, totals, strict=True)
    return _padded([_survivors(ids, values, truncation, total) for (ids, values), truncation, total in rows])


def _rows(scores: Tensor, rows: list[int]) -> Tensor:
    return scores if len(rows) == len(scores) else scores[rows]


def _bounds_by_rank(scores: Tensor, counts: list[int]) -> Tensor:
    """float32[N, 1]: numbers that at least counts[n] of row n's scores reach; NaN for a row with NaN.

    The counts[n]-th highest of the maxima of disjoint blocks is one, and takes a fraction of the time that the
    counts[n]-th highest score would take.
    """
    most = max(counts)
    block = _LARGEST_BLOCK
    while block > 1 and scores.shape[1] < 4 * most * block:
        block //= 2
    whole = scores.shape[1] - scores.shape[1] % block
    maxima = torch.cat([scores[:, :whole].unflatten(1, (-1, block)).amax(dim=2), scores[:, whole:]], dim=1)
    highest = maxima.topk(most).values
    last = torch.tensor(counts, device=scores.device).unsqueeze(1) - 1
    bounds = highest.gather(1, last).clamp_min(torch.finfo(scores.dtype).min)
    return bounds.where(~highest[:, :1].isnan(), torch.nan)


def _bounds_by_mass(scores: Tensor, top_p: list[float]) -> tuple[Tensor, list[float]]:
    """Numbers that all tokens reach which have top_p together, float32[N, 1], NaN for a row with NaN; and the rows'
    sums of exp(score - highest score)."""
    highest = scores.amax(dim=1, keepdim=True)
    parts = zip(in_chunks(scores), in_chunks(highest, scores.shape[1]), strict=True)
    totals = torch.cat([(part - top).exp_().sum(dim=1) for part, top in parts]).tolist()
    size = scores.shape[1]
    least = [
        least_score(top, total, size, p) for top, total, p in zip(highest[:, 0].tolist(), totals, top_p, strict=True)
    ]
    bounds = torch.tensor(least, dtype=torch.float64, device=_HOST).float().clamp_min(torch.finfo(torch.float32).min)
    return bounds.unsqueeze(1).to(scores.device), totals


def reaching_by_row(scores: Tensor, bounds: Tensor) -> list[Reaching]:
    """Ids and scores of the entries of each row that are at least its bound. The fast way on a CPU.

    Args:
        scores: float32[N, V].
        bounds: float32[N, 1].
    """
    found = []
    for row, bound in zip(scores.numpy(), bounds.numpy(), strict=True):
        ids = (row >= bound).nonzero()[0]
        found.append((ids, row[ids]))
    return found


def reaching_by_mask(scores: Tensor, bounds: Tensor) -> list[Reaching]:
    """The same in a few operations for all rows, so that only what is found leaves the device."""
    rows, columns = (scores >= bounds).nonzero(as_tuple=True)
    ends = rows.bincount(minlength=len(scores)).cumsum(dim=0).tolist()
    ids, values = columns.cpu().numpy(), scores[rows, columns].cpu().numpy()
    return list(zip(np.split(ids, ends[:-1]), np.split(values, ends[:-1]), strict=True))


def _survivors(ids: Ids, scores: Scores, truncation: Truncation, total: float) -> _Survivors | None:
    """What the truncation leaves of a row's likeliest tokens; None if that is uncertain.

    Args:
        total: sum of exp(score - highest score) over the whole row, if there is no top-k.
    """
    left = _Survivors(ids, scores, np.zeros(len(ids), dtype=np.bool_))
    if len(ids) == 0 or not np.isfinite(highest := scores.max()):
        return left
    if truncation.top_k is not None:
        if len(ids) > truncation.top_k + _MOST_TIES:
            return None
        if len(ids) > truncation.top_k:
            # What equals the k-th highest score stays.
            left = left.where(scores >= np.partition(scores, -truncation.top_k)[-truncation.top_k])
        total = float(np.exp(left.scores - highest).sum(dtype=np.float64))
    if truncation.top_p is not None:
        inside = nucleus(left.scores, total, truncation.top_p)
        if inside is None:
            return None
        left = _Survivors(left.ids, left.scores, inside.doubtful).where(inside.kept)
    if truncation.min_p:
        ratios = np.exp(left.scores.astype(np.float64) - highest)
        if (np.abs(ratios - truncation.min_p) < _RATIO_TOLERANCE * truncation.min_p).any():
            return None
        left = left.where(ratios >= truncation.min_p)
    return left


def _padded(rows: Sequence[_Survivors | None]) -> Candidates:
    width = max([1, *(len(row.ids) for row in rows if row is not None)])
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device=_HOST)
    scores = torch.full((len(rows), width), EXCLUDED, dtype=torch.float32, device=_HOST)
    doubtful = {}
    for index, row in enumerate(rows):
        if row is not None:
            ids[index, : len(row.ids)] = torch.from_numpy(row.ids)
            scores[index, : len(row.ids)] = torch.from_numpy(row.scores)
            if row.doubtful.any():
                doubtful[index] = row.doubtful_columns()
    return Candidates(ids, scores, [row is None for row in rows], doubtful)

"""Top-k, top-p and min-p on the few tokens that can survive them, instead of sorting the whole vocabulary.

The result is the set of tokens that the full stages keep, as far as float32 rounding does not decide: tokens that it
decides about are doubtful, and a row with too many of them is uncertain and must go through the full stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hfpaged.native import library
from hfpaged.sampling.distribution import in_chunks
from hfpaged.sampling.nucleus import Ids, LikelyTokens, Scores, nuclei
from hfpaged.sampling.stages import EXCLUDED, BatchedStage, MinP, TopK, TopP

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


def can_truncate() -> bool:
    """Whether `truncate` can be called: it needs the compiled kernels."""
    return library.unavailable() is None


def truncate(scores: Tensor, truncations: Sequence[Truncation]) -> Candidates:
    """Apply each row's truncation.

    Args:
        scores: float32[N, V], not modified. A row with NaN has no surviving tokens.
        truncations: one a row.

    Raises:
        NativeKernelError: unless `can_truncate`.
    """
    likely = _likely(scores, truncations)
    nothing = LikelyTokens(np.empty(0, dtype=np.float32))
    kept = nuclei([nothing if tokens is None else tokens for tokens in likely], [each.top_p for each in truncations])
    doubtful = {row: _least_likely(kept.scores[row], count) for row, count in enumerate(kept.doubtful) if count}
    uncertain = [tokens is None or count < 0 for tokens, count in zip(likely, kept.kept, strict=True)]
    for row in _exclude_by_min_p(kept.scores, truncations):
        uncertain[row] = True
    return Candidates(
        torch.from_numpy(kept.ids),
        torch.from_numpy(kept.scores),
        uncertain,
        {row: left for row, columns in doubtful.items() if (left := _finite(kept.scores[row], columns))},
    )


def _likely(scores: Tensor, truncations: Sequence[Truncation]) -> list[LikelyTokens | None]:
    """The tokens that top-k leaves, or that may be in the nucleus; None for a row where too many are tied."""
    by_rank = [row for row, truncation in enumerate(truncations) if truncation.top_k is not None]
    by_mass = [row for row, truncation in enumerate(truncations) if truncation.top_k is None]
    likely: list[LikelyTokens | None] = [None] * len(scores)
    for rows, find in ((by_rank, _likely_by_rank), (by_mass, _likely_by_mass)):
        if rows:
            found = find(_rows(scores, rows), [truncations[row] for row in rows])
            for row, tokens in zip(rows, found, strict=True):
                likely[row] = tokens
    return likely


def _rows(scores: Tensor, rows: list[int]) -> Tensor:
    return scores if len(rows) == len(scores) else scores[rows]


def _likely_by_rank(scores: Tensor, truncations: Sequence[Truncation]) -> list[LikelyTokens | None]:
    """What top-k leaves of each row; None if too many tokens are tied."""
    counts = [min(truncation.top_k, scores.shape[1]) for truncation in truncations]
    reaching = reaching_by_row if scores.device.type == "cpu" else reaching_by_mask
    return [
        _highest(ids, values, truncation.top_k)
        for (ids, values), truncation in zip(
            reaching(scores, _bounds_by_rank(scores, counts)), truncations, strict=True
        )
    ]


def _highest(ids: Ids, scores: Scores, count: int) -> LikelyTokens | None:
    if len(ids) > count + _MOST_TIES:
        return None
    if len(ids) > count:
        # What equals the lowest of them stays. Several times as fast as indexing by the mask.
        places = (scores >= np.partition(scores, -count)[-count]).nonzero()[0]
        ids, scores = ids[places], scores[places]
    return LikelyTokens(scores, ids)


def _likely_by_mass(scores: Tensor, truncations: Sequence[Truncation]) -> list[LikelyTokens]:
    """What may be in the nucleus: on a CPU all tokens, from a device those that are not too unlikely."""
    if scores.device.type == "cpu":
        return [LikelyTokens(row) for row in scores.contiguous().numpy()]
    bounds, totals = _bounds_by_mass(scores, [truncation.top_p for truncation in truncations])
    found = zip(reaching_by_mask(scores, bounds), totals, strict=True)
    return [LikelyTokens(values, ids, total) for (ids, values), total in found]


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
    totals = torch.cat([(part - top).exp_().sum(dim=1) for part, top in parts]).double().cpu()
    rest = (1 - torch.tensor(top_p, dtype=torch.float64, device=_HOST)) * totals
    # So many tokens that do not reach this have too little together to be in the nucleus; see also csrc/nucleus.cpp.
    least = highest[:, 0].cpu() + ((rest / 4 - 1e-6 * totals).clamp_min(0) / scores.shape[1]).log()
    bounds = least.float().clamp_min(torch.finfo(torch.float32).min)
    return bounds.unsqueeze(1).to(scores.device), totals.tolist()


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


def _least_likely(scores: Scores, count: int) -> list[int]:
    """Columns of the `count` lowest of the scores above -inf; of equal ones the first ones, in order."""
    columns = np.flatnonzero(scores > EXCLUDED)
    columns = columns[scores[columns] <= np.partition(scores[columns], count - 1)[count - 1]]
    return columns[np.argsort(scores[columns], kind="stable")[:count]].tolist()


def _finite(scores: Scores, columns: list[int]) -> list[int]:
    return [column for column in columns if scores[column] > EXCLUDED]


def _exclude_by_min_p(scores: Scores, truncations: Sequence[Truncation]) -> list[int]:
    """Exclude what min-p excludes, in place. Returns the rows in which rounding decides about a token."""
    rows = [row for row, truncation in enumerate(truncations) if truncation.min_p]
    if not rows:
        return []
    part = scores[rows]
    least = np.array([truncations[row].min_p for row in rows])[:, None]
    with np.errstate(invalid="ignore"):  # rows without tokens
        ratios = np.exp(part.astype(np.float64) - part.max(axis=1, keepdims=True))
    part[ratios < least] = EXCLUDED
    scores[rows] = part
    near = (np.abs(ratios - least) < _RATIO_TOLERANCE * least).any(axis=1)
    return [row for row, is_near in zip(rows, near.tolist(), strict=True) if is_near]

"""Top-k, top-p and min-p on the few tokens that can survive them, instead of sorting the whole vocabulary.

The result is the set of tokens that the full stages keep, or "uncertain" where float32 rounding could make the
difference; an uncertain row must go through the full stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.sampling.stages import EXCLUDED, BatchedStage, MinP, TopK, TopP

Reaching = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

# Everything here is computed on the host, whatever the default device.
_HOST = torch.device("cpu")
# Candidates of a row without top-k: its likeliest tokens, which hold all of top_p unless the distribution is flat.
_WITHOUT_TOP_K = 1024
# A row with more tokens tied at the k-th score than this much over k is left to the full stages.
_MOST_TIES = 4096
_LARGEST_BLOCK = 64
# How far stock's float32 arithmetic may be from exact, in a cumulative probability and, relatively, in the ratio of two
# probabilities. The largest errors seen are 6e-7 and 2e-6, on vocabularies of 50,000 and 150,000 tokens.
_SUM_TOLERANCE = 1e-5
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
        """How many of the likeliest tokens to look at."""
        return self.top_k if self.top_k is not None else _WITHOUT_TOP_K


@dataclass(frozen=True, slots=True)
class Candidates:
    """The surviving tokens of N rows, on the CPU.

    Attributes:
        ids: int64[N, W], ascending token ids, then padding.
        scores: float32[N, W], their scores; -inf where a token was excluded and in the padding.
        uncertain: bool[N], rows whose scores here must not be used.
    """

    ids: Tensor
    scores: Tensor
    uncertain: Tensor


def truncate(scores: Tensor, truncations: Sequence[Truncation]) -> Candidates:
    """Apply each row's truncation.

    Args:
        scores: float32[N, V], not modified. A row with NaN has no surviving tokens.
        truncations: one a row.
    """
    counts = [min(truncation.candidate_count, scores.shape[1]) for truncation in truncations]
    ids, values, uncertain = _gather(scores, _lower_bounds(scores, counts), counts)
    has_top_k = torch.tensor([truncation.top_k is not None for truncation in truncations], device=_HOST)
    top_p = _column([torch.inf if truncation.top_p is None else truncation.top_p for truncation in truncations])
    min_p = _column([truncation.min_p or 0.0 for truncation in truncations])
    _apply_top_k(values, counts, has_top_k)
    mass = torch.exp(values.double() - values.amax(dim=1, keepdim=True))
    totals = mass.sum(dim=1)
    if not has_top_k.all():
        totals[~has_top_k] = _full_mass(scores[~has_top_k.to(scores.device)])
        # There are tokens below these candidates; all of them must have top_p of the mass above them.
        uncertain |= ~has_top_k & (mass.sum(dim=1) / totals < top_p[:, 0] + _SUM_TOLERANCE)
    uncertain |= _apply_top_p(values, mass, totals, top_p)
    uncertain |= _apply_min_p(values, mass, min_p)
    return Candidates(ids, values, uncertain)


def _lower_bounds(scores: Tensor, counts: list[int]) -> Tensor:
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


def _gather(scores: Tensor, bounds: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and scores of all tokens that reach the row's bound, and which rows have too many of them."""
    reaching = reaching_by_row if scores.device.type == "cpu" else reaching_by_mask
    found = reaching(scores, bounds)
    too_many = [len(ids) > count + _MOST_TIES for (ids, _), count in zip(found, counts, strict=True)]
    uncertain = torch.tensor(too_many, device=_HOST)
    kept = (~uncertain).nonzero()[:, 0].tolist()
    width = max([1, *(len(found[row][0]) for row in kept)])
    ids = torch.zeros(len(scores), width, dtype=torch.int64, device=_HOST)
    values = torch.full((len(scores), width), EXCLUDED, dtype=torch.float32, device=_HOST)
    for row in kept:
        row_ids, row_values = found[row]
        ids[row, : len(row_ids)] = torch.from_numpy(row_ids)
        values[row, : len(row_ids)] = torch.from_numpy(row_values)
    return ids, values, uncertain


def reaching_by_row(scores: Tensor, bounds: Tensor) -> list[Reaching]:
    """Ids and scores of the entries of each row that are at least its bound. The fast way on a CPU.

    Args:
        scores: float32[N, V].
        bounds: float32[N, 1].
    """
    found = []
    for row, bound in zip(scores.numpy(), bounds.numpy(), strict=True):
        ids = np.flatnonzero(row >= bound)
        found.append((ids, row[ids]))
    return found


def reaching_by_mask(scores: Tensor, bounds: Tensor) -> list[Reaching]:
    """The same in a few operations for all rows, so that only what is found leaves the device."""
    rows, columns = (scores >= bounds).nonzero(as_tuple=True)
    ends = rows.bincount(minlength=len(scores)).cumsum(dim=0).tolist()
    ids, values = columns.cpu().numpy(), scores[rows, columns].cpu().numpy()
    return list(zip(np.split(ids, ends[:-1]), np.split(values, ends[:-1]), strict=True))


def _full_mass(scores: Tensor) -> Tensor:
    """float64[N] on the CPU: sum over all tokens of exp(score - highest score)."""
    return (scores - scores.amax(dim=1, keepdim=True)).exp_().sum(dim=1).double().cpu()


def _apply_top_k(values: Tensor, counts: list[int], has_top_k: Tensor) -> None:
    """Exclude what is below the k-th highest score; what equals it stays."""
    # A row that is narrower than its k has excluded tokens among its k highest.
    last = (torch.tensor(counts, device=_HOST) - 1).clamp_max(values.shape[1] - 1)
    thresholds = values.sort(dim=1, descending=True).values.gather(1, last.unsqueeze(1))
    values.masked_fill_((values < thresholds) & has_top_k.unsqueeze(1), EXCLUDED)


def _apply_top_p(values: Tensor, mass: Tensor, totals: Tensor, top_p: Tensor) -> Tensor:
    """Exclude, in `values` and `mass`, the tokens that have top_p of the mass above them; returns uncertain rows."""
    if top_p.isinf().all():
        return torch.zeros(len(values), dtype=torch.bool, device=_HOST)
    # Ascending and stable, as the full stage orders equal scores.
    order = values.sort(dim=1, stable=True).indices
    descending = mass.gather(1, order).flip(1)
    above = (descending.cumsum(dim=1) - descending).flip(1) / totals.unsqueeze(1)
    remove = above >= top_p
    remove[:, -1] = False
    remove = remove.scatter(1, order, remove)
    values.masked_fill_(remove, EXCLUDED)
    mass.masked_fill_(remove, 0.0)
    return ((above - top_p).abs() < _SUM_TOLERANCE).any(dim=1)


def _apply_min_p(values: Tensor, mass: Tensor, min_p: Tensor) -> Tensor:
    """Exclude the tokens with less than min_p of the highest probability; returns the uncertain rows."""
    # The likeliest token has mass 1, so a mass is the ratio.
    values.masked_fill_(mass < min_p, EXCLUDED)
    return ((mass - min_p).abs() < _RATIO_TOLERANCE * min_p).any(dim=1)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=_HOST).unsqueeze(1)

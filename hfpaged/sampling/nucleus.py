"""The nuclei of distributions: the likeliest tokens that have top_p together (csrc/nucleus.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hfpaged.native import library

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """The likeliest tokens of a row, all that may be in its nucleus.

    Attributes:
        scores: float32[W], contiguous, in the order of their ids.
        ids: int64[W], contiguous; None: 0, 1, ...
        total: sum of exp(score - highest score) over all tokens of the row; None: these are all.
    """

    scores: Scores
    ids: Ids | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Nuclei:
    """The nuclei of N rows.

    Attributes:
        ids: int64[N, W], ascending token ids, then padding.
        scores: float32[N, W], their scores; -inf in the padding.
        kept: tokens of each row; 0: a score is NaN or +inf, or all are -inf; -1: rounding decides about too many.
        doubtful: of how many of them, the least likely, rounding decides. They stay in order: none without all that
            are likelier, and of equal ones the last ids.
    """

    ids: Ids
    scores: Scores
    kept: list[int]
    doubtful: list[int]


def nuclei(rows: Sequence[LikelyTokens], top_p: Sequence[float | None]) -> Nuclei:
    """The nucleus of each row, with those tokens of which only float32 rounding in stock's stage decides.

    Args:
        top_p: one a row; None: all tokens stay whose scores are above -inf.
    """
    kernels, threads = library.load(), torch.get_num_threads()
    structs = (library.NucleusRow * len(rows))(*map(_struct, rows, top_p))
    library.check(kernels.hfp_nucleus(structs, len(rows), threads))
    width = max(1, *(struct.kept for struct in structs)) if rows else 1
    ids = np.empty((len(rows), width), dtype=np.int64)
    scores = np.empty((len(rows), width), dtype=np.float32)
    library.check(kernels.hfp_nucleus_take(structs, len(rows), width, ids.ctypes.data, scores.ctypes.data, threads))
    return Nuclei(ids, scores, [struct.kept for struct in structs], [struct.doubtful for struct in structs])


def _struct(row: LikelyTokens, top_p: float | None) -> library.NucleusRow:
    return library.NucleusRow(
        row.scores.ctypes.data,
        None if row.ids is None else row.ids.ctypes.data,
        len(row.scores),
        row.total or 0.0,
        -1.0 if top_p is None else top_p,
    )

"""Drawing from processed scores with given uniform numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.native import library

_UNDECIDED = -2  # HFP_UNDECIDED of csrc/draw.h
# Rows are taken a few at a time so that copies of them stay in the cache on a CPU and small on a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}


def inverse_cdf(scores: Tensor, uniforms: npt.NDArray[np.float64]) -> list[int]:
    """Draw one index a row by inverting the cumulative distribution in index order.

    With p = exp(score - highest score) and its cumulative sums c in float64, the index is the first with
    c > uniform * c[-1]. An excluded entry (-inf) is never drawn, and removing it would not change the others' sums.

    Args:
        scores: float32[N, W].
        uniforms: float64[N] in [0, 1).

    Returns:
        The indices; -1 for a row with NaN or +inf, or with nothing but -inf.
    """
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or library.unavailable():
        return drawn_indices(scores, torch.from_numpy(uniforms).to(scores.device)).tolist()
    drawn = _drawn_natively(scores.contiguous(), uniforms)
    undecided = np.flatnonzero(drawn == _UNDECIDED)
    if len(undecided):
        drawn[undecided] = drawn_indices(scores[undecided], torch.from_numpy(uniforms[undecided])).numpy()
    return drawn.tolist()


def _drawn_natively(scores: Tensor, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The same by float32 masses; _UNDECIDED where these are too coarse to tell."""
    drawn, (count, width) = np.empty(len(scores), dtype=np.int64), scores.shape
    uniforms = np.ascontiguousarray(uniforms)
    addresses = (uniforms.ctypes.data, drawn.ctypes.data)
    library.load().hfp_draw(scores.data_ptr(), width, width, count, *addresses, torch.get_num_threads())
    return drawn


def drawn_indices(scores: Tensor, uniforms: Tensor) -> Tensor:
    """`inverse_cdf` with everything, uniforms and result (int64[N]) too, on the scores' device."""
    chosen = []
    for part, numbers in zip(in_chunks(scores), in_chunks(uniforms, scores.shape[1]), strict=True):
        cumulative = (part.double() - part.amax(dim=1, keepdim=True)).exp_().cumsum(dim=1)
        totals = cumulative[:, -1:]
        found = torch.searchsorted(cumulative, numbers.unsqueeze(1) * totals, right=True)
        # A number as an argument of the kernel: `where` would copy it to the device.
        chosen.append(found.masked_fill_(~totals.isfinite(), -1)[:, 0])
    return torch.cat(chosen)


def in_chunks(rows: Tensor, width: int | None = None) -> Sequence[Tensor]:
    """A few rows at a time, of a matrix or, if its width is given, of what goes with it."""
    width = rows.shape[1] if width is None else width
    return rows.split(max(1, _CHUNK_ELEMENTS.get(rows.device.type, 1 << 18) // width))


def first_maximum(scores: Tensor) -> list[int]:
    """Index of the first highest entry of each row, as `torch.argmax` on the float32 scores of stock.

    Args:
        scores: [N, V] of any floating dtype, on any device.
    """
    if scores.device.type == "cpu":
        # NumPy's argmax uses SIMD and PyTorch's does not: 10 to 20 times faster, even after a conversion from bfloat16.
        return scores.to(torch.float32).numpy().argmax(axis=1).tolist()
    if scores.dtype == torch.float64:
        scores = scores.to(torch.float32)
    return scores.argmax(dim=1).tolist()

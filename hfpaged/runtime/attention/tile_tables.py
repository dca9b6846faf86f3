"""TileTables: a step's block tables and the division of its tokens among programs, as Triton kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hfpaged.runtime.attention.page_tables import compressed
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.staging import PinnedRing

# Tokens of one request that a program takes, where it has more than one in the step.
TILE_TOKENS = 64


class Tiles(NamedTuple):
    """Runs of tokens, each of one request. int32 on the device.

    Attributes:
        request: [N], whose they are.
        first: [N], the first packed token.
    """

    request: torch.Tensor
    first: torch.Tensor


class TileTables(NamedTuple):
    """R requests. All int32 on the device.

    Attributes:
        query_start: [R + 1], first packed token of each request, then T.
        page_start: [R + 1], first entry of each request in `pages`, then their number.
        context_len: [R], tokens of the request, those of this step included.
        singles: the tokens of requests that have one in the step.
        tiles: up to `TILE_TOKENS` each of the other requests' tokens.
        pages: block ids.
    """

    query_start: torch.Tensor
    page_start: torch.Tensor
    context_len: torch.Tensor
    singles: Tiles
    tiles: Tiles
    pages: torch.Tensor


class TileTableWriter:
    """Writes one step's tables after the other; each holds until the one after the next is written."""

    def __init__(self, accelerator: Accelerator):
        self._ring = PinnedRing(accelerator, torch.int32)

    def write(self, batch: StepBatch, out: torch.Tensor | None = None) -> TileTables:
        """Queue the copy of a step's tables.

        Args:
            out: int32 memory on the device for them, the same parts of it for any batch of as many single tokens;
                None: new memory.
        """
        page_start, _, pages = compressed(batch)
        singles, tiles = divided(np.asarray(batch.query_start, dtype=np.int32))
        parts = (batch.query_start, page_start, batch.context_len, *singles, *tiles, pages)
        starts, page_starts, contexts, *halves, device_pages = self._ring.upload(parts, out)
        return TileTables(starts, page_starts, contexts, Tiles(*halves[:2]), Tiles(*halves[2:]), device_pages)

    @staticmethod
    def size_of_singles(batch: StepBatch, size: int) -> int:
        """Numbers in the tables of a batch of single tokens that is padded to `size` requests."""
        pages = int((-(-batch.context_len // batch.block_size)).sum()) + size - len(batch.context_len)
        return 2 * (size + 1) + 3 * size + pages


def divided(query_start: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(requests, first tokens) of requests with one token, and of the tiles of the others, int32."""
    counts = np.diff(query_start)
    singles = np.flatnonzero(counts == 1).astype(np.int32)
    tiles_each = np.where(counts > 1, -(-counts // TILE_TOKENS), 0)
    requests = np.repeat(np.arange(len(counts), dtype=np.int32), tiles_each)
    number = np.arange(len(requests)) - np.repeat(np.cumsum(tiles_each) - tiles_each, tiles_each)
    first = query_start[requests] + number.astype(np.int32) * TILE_TOKENS
    return (singles, query_start[singles]), (requests, first)

"""Which requests of a step begin with the same blocks, so that attention can read these once for all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hfpaged.runtime.batch import StepBatch


class SharedPrefixes(NamedTuple):
    """G groups of requests, next to each other in the batch, that together are all of it.

    Attributes:
        start: int32 [G + 1], first request of each group, then the number of requests.
        blocks: int32 [G], blocks that all requests of the group begin with: at least 1, never a request's last block.
    """

    start: np.ndarray
    blocks: np.ndarray

    def saved_blocks(self) -> int:
        """Blocks that need not be read again."""
        return int(((np.diff(self.start) - 1) * self.blocks).sum())


def find_shared_prefixes(batch: StepBatch) -> SharedPrefixes | None:
    """Group the requests of a step of one token each.

    A request that shares nothing is a group with its own first block. None: a request has no block but its last, so
    that there is no grouping of all of them, or nothing is shared.
    """
    whole = (batch.context_len - 1) // batch.block_size
    if len(whole) < 2 or whole.min() < 1:
        return None
    first = batch.block_tables[batch.table_rows, 0]
    if not (first[1:] == first[:-1]).any():
        return None
    tables = batch.block_tables[batch.table_rows, : whole.max()]
    differs = tables[1:] != tables[:-1]
    same = np.where(differs.any(axis=1), differs.argmax(axis=1), whole.max())
    return _grouped(np.minimum(same, np.minimum(whole[1:], whole[:-1])).tolist())


def _grouped(same: list[int]) -> SharedPrefixes:
    """Groups out of how many blocks each request but the first has in common with the one before it."""
    start, blocks = [0], [1]
    for request, common in enumerate(same, start=1):
        is_alone = start[-1] == request - 1
        # One that shares much less than the group does begins another.
        if common and (is_alone or 2 * common >= blocks[-1]):
            blocks[-1] = common if is_alone else min(blocks[-1], common)
        else:
            start.append(request)
            blocks.append(1)
    return SharedPrefixes(np.array([*start, len(same) + 1], dtype=np.int32), np.array(blocks, dtype=np.int32))

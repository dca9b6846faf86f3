"""BooksSnapshot: plain data about who holds which block, for those who watch."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from hfpaged.core.request import Request, RequestState
from hfpaged.core.scheduler import Scheduler

MOST_REFERENCES = 255


class RequestSnapshot(NamedTuple):
    """One live request.

    Attributes:
        id: as in `GenerationHandle.request_id`.
        state: value of a `RequestState`: "waiting", "parked", "forking", "running" or "idle".
        prompt_len: tokens of the prompt.
        num_tokens: known tokens, prompt and generated.
        num_computed: those of them whose keys and values are in blocks.
        max_tokens: the most tokens that it may come to have.
        swapped: whether its keys and values are in the host's store instead of in blocks.
        blocks: its blocks in order of position, without those beyond the snapshot's first `max_blocks` ids.
    """

    id: int
    state: str
    prompt_len: int
    num_tokens: int
    num_computed: int
    max_tokens: int
    swapped: bool
    blocks: tuple[int, ...]


class BooksSnapshot(NamedTuple):
    """A pool and its requests between two steps.

    Attributes:
        num_blocks, block_size: of the whole pool.
        references: for each of the first blocks by id, how many block tables contain it, at most 255.
        cached: for each of the same blocks, 1 if its content can be found by another request, else 0.
        num_requests: all live requests.
        requests: the first of them: running ones before others, each in order of service.
    """

    num_blocks: int
    block_size: int
    references: bytes
    cached: bytes
    num_requests: int
    requests: tuple[RequestSnapshot, ...]


def snapshot(scheduler: Scheduler, max_blocks: int, max_requests: int) -> BooksSnapshot:
    """Look at the books of a scheduler that has no plan out. Costs time in proportion to what is returned.

    Args:
        max_blocks: how many blocks to tell about. Low ids are used first.
        max_requests: how many requests to tell about.
    """
    pool = scheduler.pool
    blocks = range(min(pool.num_blocks, max_blocks))
    shown = heapq.nsmallest(max_requests, scheduler.requests.values(), key=_running_first)
    return BooksSnapshot(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        references=bytes(min(pool.references(block), MOST_REFERENCES) for block in blocks),
        cached=bytes(pool.is_cached(block) for block in blocks),
        num_requests=len(scheduler.requests),
        requests=tuple(_snapshot_request(request, len(blocks)) for request in shown),
    )


def _running_first(request: Request) -> tuple[bool, tuple[int, int]]:
    return request.state is not RequestState.RUNNING, request.order


def _snapshot_request(request: Request, max_blocks: int) -> RequestSnapshot:
    return RequestSnapshot(
        id=request.id,
        state=request.state.value,
        prompt_len=request.prompt_len,
        num_tokens=len(request.tokens),
        num_computed=request.computed,
        max_tokens=request.max_tokens,
        swapped=request.swapped,
        blocks=tuple(block for block in request.blocks if block < max_blocks),
    )

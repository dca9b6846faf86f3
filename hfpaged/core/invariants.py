"""check(): everything that must hold between two steps. A failure is always a bug in hfpaged."""

from __future__ import annotations

from collections import Counter

from hfpaged.core.request import Request, RequestState
from hfpaged.core.scheduler import Scheduler
from hfpaged.errors import InvariantError


def check(books: Scheduler) -> None:
    """Raise `InvariantError` if the block books contradict themselves. Time grows with everything that is live."""
    _check_pool(books)
    for request in books.requests.values():
        _check_request(books, request)
    _check_queues(books)
    dead = books.prefix_cache.claimants - set(books.requests)
    _require(not dead, f"requests {sorted(dead)} are gone but still claim blocks")


def _check_pool(books: Scheduler) -> None:
    pool = books.pool
    held = Counter(block for request in books.requests.values() for block in request.blocks)
    free = list(pool.reuse_order())
    _require(len(free) == pool.num_free == len(set(free)), "a block is free twice")
    _require(not held.keys() & set(free), f"blocks {sorted(held.keys() & set(free))} are held and free")
    _require(len(held) + len(free) == pool.num_blocks, f"{pool.num_blocks - len(held) - len(free)} blocks are lost")
    for block in range(pool.num_blocks):
        _require(
            pool.references(block) == held[block],
            f"block {block} has {pool.references(block)} references but is in {held[block]} tables",
        )


def _check_request(books: Scheduler, request: Request) -> None:
    name = f"request {request.id}"
    size = books.pool.block_size
    _require(0 <= request.computed <= request.length, f"{name} has computed more tokens than it has")
    _require(request.length <= request.max_tokens, f"{name} is longer than it said")
    _require(request.published * size <= len(request.tokens), f"{name} has published tokens that nobody knows")
    if request.swapped:
        _require(not request.blocks, f"{name} is swapped out but holds blocks")
        return
    needed = books.pool.blocks_for(request.computed)
    _require(len(request.blocks) >= needed, f"{name} has computed tokens without a block")
    _require(len(request.blocks) * size - request.computed < size, f"{name} wastes a block or more")
    _require(len(set(request.blocks)) == len(request.blocks), f"{name} has a block twice in its table")
    _require(request.published * size <= request.computed, f"{name} has published blocks that are not full")


def _check_queues(books: Scheduler) -> None:
    for queue, state in ((books.running, RequestState.RUNNING), (books.waiting, RequestState.WAITING)):
        orders = [request.order for request in queue]
        _require(orders == sorted(orders), f"the {state.value} queue is out of order")
        _require(len(set(orders)) == len(orders), f"a request is twice in the {state.value} queue")
        _require(all(request.state is state for request in queue), f"a stranger is in the {state.value} queue")
        _require(all(request.num_uncomputed for request in queue), f"a {state.value} request has nothing to compute")
    counts = Counter(request.state for request in books.requests.values())
    _require(counts[RequestState.RUNNING] == len(books.running), "a running request is not in its queue")
    _require(counts[RequestState.WAITING] == len(books.waiting), "a waiting request is not in its queue")
    _require(counts[RequestState.PARKED] == len(books.prefix_cache.parked), "a parked request is lost")
    for request in books.running:
        _require(bool(request.blocks), f"request {request.id} runs without blocks")
    for request in books.requests.values():
        if request.state is RequestState.IDLE:
            # The last token of a text is never computed.
            has_all = request.num_uncomputed == 0 or (
                request.num_uncomputed == 1 and request.length == request.max_tokens
            )
            _require(has_all or not request.blocks, f"request {request.id} idles with tokens to compute")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantError(otherwise)

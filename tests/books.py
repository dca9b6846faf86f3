"""A scheduler over a small pool, and a memory that executes plans, for tests of the books."""

from __future__ import annotations

from hfpaged.core.block_pool import BlockPool
from hfpaged.core.invariants import check
from hfpaged.core.plan import Plan
from hfpaged.core.preemption import PreemptionPolicy
from hfpaged.core.prefix_cache import PrefixCache, root_key
from hfpaged.core.request import Request
from hfpaged.core.scheduler import Scheduler, SchedulerLimits

ROOT = root_key("test")


def make_books(num_blocks=16, block_size=4, max_batch_tokens=16, max_requests=8, preemption="auto", can_store=None):
    pool = BlockPool(num_blocks, block_size)
    policy = PreemptionPolicy(preemption, 1.0, 2.0, can_store or (lambda count: True))
    return Scheduler(pool, PrefixCache(pool), SchedulerLimits(max_batch_tokens, max_requests), policy)


def make_request(request_id, prompt, max_tokens=None, **fields):
    fields.setdefault("cache_root", ROOT)
    fields.setdefault("arrival", request_id)
    return Request(request_id, list(prompt), len(prompt), max_tokens or len(prompt) + 8, **fields)


class Memory:
    """What the blocks would hold: slot -> the tokens of the sequence up to and including that position.

    Executes plans as a runner does, and fails if a request would attend to anything but its own tokens.
    """

    def __init__(self, books: Scheduler):
        self.books = books
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.store: dict[int, list[dict[int, tuple[int, ...]]]] = {}
        self.tables: dict[int, list[int]] = {}

    def text(self, request_id: int) -> list[int]:
        """The request's tokens."""
        return self.books.requests[request_id].tokens

    def execute(self, plan: Plan) -> None:
        for request_id, blocks in plan.stores:
            self.store[request_id] = [self._content(block) for block in blocks]
        contents = [(destination, self._content(source)) for source, destination in plan.copies]
        for destination, content in contents:
            self._fill(destination, content)
        for request_id, blocks in plan.loads:
            assert len(blocks) <= len(self.store[request_id])
            for block, content in zip(blocks, self.store[request_id], strict=False):
                self._fill(block, content)
        for entry in plan.entries:
            self._write(entry)
        for entry in plan.entries:
            self._attend(entry)

    def _write(self, entry) -> None:
        if entry.full_table is not None:
            self.tables[entry.id] = list(entry.full_table)
        table = self.tables[entry.id]
        table[entry.first_new_index : entry.first_new_index + len(entry.new_blocks)] = entry.new_blocks
        tokens = self.text(entry.id)
        assert list(entry.tokens) == tokens[entry.start : entry.start + entry.num_tokens]
        for position in range(entry.start, entry.start + entry.num_tokens):
            block, offset = divmod(position, self.books.pool.block_size)
            self.slots[table[block], offset] = tuple(tokens[: position + 1])

    def _attend(self, entry) -> None:
        tokens = self.text(entry.id)
        for position in range(entry.start + entry.num_tokens):
            block, offset = divmod(position, self.books.pool.block_size)
            assert self.slots[self.tables[entry.id][block], offset] == tuple(tokens[: position + 1])

    def _content(self, block: int) -> dict[int, tuple[int, ...]]:
        return {offset: tokens for (owner, offset), tokens in self.slots.items() if owner == block}

    def _fill(self, block: int, content: dict[int, tuple[int, ...]]) -> None:
        for offset in range(self.books.pool.block_size):
            self.slots.pop((block, offset), None)
        self.slots.update({(block, offset): tokens for offset, tokens in content.items()})


def sample_of(books, plan, steered=()):
    """A next token for each request that catches up, decided by its text alone; None for steered ones."""
    sampled = {}
    for entry in plan.entries:
        for request_id in entry.samples:
            text = books.requests[entry.id].tokens
            sampled[request_id] = None if request_id in steered else (sum(text) * 7 + len(text) + request_id) % 50
    return sampled


def run_step(books, memory=None, steered=()):
    """One step; returns its plan. Requests that reach their length are finished."""
    plan = books.plan()
    if plan is None:
        return None
    if memory is not None:
        memory.execute(plan)
    sampled = sample_of(books, plan, steered)
    books.commit(plan, sampled)
    for request_id in sampled:
        request = books.requests[request_id]
        if len(request.tokens) >= request.max_tokens:
            books.finish(request_id)
    check(books)
    return plan


def run_to_end(books, memory=None, limit=10_000):
    """Steps until nothing is left; returns how many."""
    for steps in range(limit):
        if run_step(books, memory) is None:
            assert not books.requests
            return steps
    raise AssertionError(f"not finished after {limit} steps")

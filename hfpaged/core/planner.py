"""Planner: makes one plan. It reads the books and writes only to its own draft, so that dropping it changes nothing."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hfpaged.core.block_pool import PoolDraft
from hfpaged.core.plan import UNKNOWN_TOKEN, Plan, PlannedRequest
from hfpaged.core.request import Request

if TYPE_CHECKING:
    from hfpaged.core.scheduler import Scheduler


class Planner:
    """First the running requests, oldest first, each as many tokens as it has left and its share allows. Then, if
    nobody had to be preempted, waiting ones are admitted. Memory is taken from the newest when it runs out.

    Attributes:
        draft: block changes of the plan.
        admitted: waiting requests that start, with the cached blocks they share.
        parked: waiting requests to set aside, with the hash of the block they wait for.
        victims: requests that lose their blocks; True if swapped out.
    """

    def __init__(self, books: Scheduler):
        self._books = books
        self._block_size = books.pool.block_size
        self.draft = PoolDraft(books.pool)
        self.admitted: dict[Request, list[int]] = {}
        self.parked: dict[Request, bytes] = {}
        self.victims: dict[Request, bool] = {}
        self._budget = books.limits.max_batch_tokens
        self._entries: list[PlannedRequest] = []
        self._copies: list[tuple[int, int]] = []
        self._stores: list[tuple[int, tuple[int, ...]]] = []
        self._loads: list[tuple[int, tuple[int, ...]]] = []
        self._claimed: dict[bytes, int] = {}
        self._candidates: list[Request] | None = None

    def plan(self) -> Plan | None:
        """The step's plan; None if no request has anything to compute."""
        self._plan_running()
        if not self.victims:
            self._admit_waiting()
        if not self._entries and not self.victims and not self.parked:
            return None
        recomputed = tuple(request.id for request, swapped in self.victims.items() if not swapped)
        return Plan(
            self._books.next_step,
            tuple(self._entries),
            tuple(self._copies),
            tuple(self._stores),
            tuple(self._loads),
            recomputed,
        )

    # ---- who computes ----

    def _plan_running(self) -> None:
        most, running = self._books.limits.max_requests, self._books.running
        left = [request.num_uncomputed for request in running]
        decodes = [uncomputed <= request.draft_tokens + 1 for request, uncomputed in zip(running, left, strict=True)]
        decoding = sum(itertools.compress(left, decodes))
        readers = decodes.count(False)
        # Enough for all is told faster than what each needs.
        has_room = self.draft.can_take(sum(left) // self._block_size + 2 * len(running))
        for request, uncomputed, is_decoding in zip(running, left, decodes, strict=True):
            if self._budget == 0 or len(self._entries) == most:
                return
            share = self._budget
            if is_decoding:
                decoding -= uncomputed
            else:
                readers -= 1
                share = self._reading_share(decoding, readers)
            if request in self.victims:
                continue
            count = uncomputed if uncomputed <= share else self._count(request, uncomputed, share)
            if count and (has_room or self._make_room(request, count)):
                self._schedule(request, count)

    def _reading_share(self, decoding: int, readers: int) -> int:
        """Tokens that a prompt may take: what later requests that are `decoding` leave, or half if others want to read.

        So a long prompt delays everybody by a step's time, not by the time it takes to read it.
        """
        free = max(1, self._budget - decoding)
        return -(-free // 2) if readers or self._could_admit_next() else free

    def _could_admit_next(self) -> bool:
        """Whether there is room for the request that has waited longest, cached blocks aside."""
        has_slot = len(self._books.running) < self._books.limits.max_requests
        return bool(self._books.waiting) and has_slot and self._can_admit(self._books.waiting.first, [])

    def _admit_waiting(self) -> None:
        slots = self._books.limits.max_requests - len(self._books.running)
        for request in self._books.waiting:
            if self._budget == 0 or slots == 0:
                return
            if request in self.victims:
                continue
            shared: list[int] = []
            if not request.blocks and not request.swapped:
                hit = self._books.prefix_cache.look_up(request, self.draft, self._claimed)
                if hit.pending is not None:
                    self.parked[request] = hit.pending
                    continue
                shared = hit.blocks
            start = len(shared) * self._block_size if shared else request.computed
            if self._count(request, request.length - start, self._budget) == 0:
                return
            if not self._can_admit(request, shared) and not self._reclaim_for(request, shared):
                return
            self._admit(request, shared)
            slots -= 1

    def _can_admit(self, request: Request, shared: list[int]) -> bool:
        """Whether all tokens of the request fit, beside the blocks it shares or holds."""
        free_shared = sum(self.draft.references(block) == 0 for block in shared)
        total = self._books.pool.blocks_for(request.length)
        copied = 1 if request.blocks else 0
        return self.draft.can_take(total - len(shared) - len(request.blocks) + copied + free_shared)

    def _admit(self, request: Request, shared: list[int]) -> None:
        for block in shared:
            self.draft.share(block)
        self.admitted[request] = shared
        held: tuple[int, ...] = (*request.blocks, *shared)
        start = request.computed
        if request.swapped:
            held = self.draft.take(self._books.pool.blocks_for(request.computed))
            self._loads.append((request.id, held))
        elif shared:
            start = len(shared) * self._block_size
        if request.cache_root is not None:
            full = len(request.tokens) // self._block_size
            hashes = request.block_hashes(self._block_size, full)
            self._claimed.update(dict.fromkeys(hashes[start // self._block_size :], request.id))
        self._schedule(request, self._count(request, request.length - start, self._budget), start, held)

    def _count(self, request: Request, uncomputed: int, share: int) -> int:
        """How many of its tokens the step computes: all, or as many as its share of the budget allows.

        The last ones, whose logits are needed together, are never parted; as the first of a step they may exceed it.
        """
        together = request.draft_tokens + 1
        if uncomputed <= share or (uncomputed == together and not self._entries):
            return uncomputed
        return min(share, uncomputed - together)

    def _schedule(
        self, request: Request, count: int, start: int | None = None, held: tuple[int, ...] | None = None
    ) -> None:
        """Add an entry. `start` and `held` are given for a request that enters with blocks the books do not show."""
        start = request.computed if start is None else start
        end = start + count
        table = request.blocks if held is None else held
        first_new, new_blocks = self._take_blocks(table, start, end)
        catches_up = end == request.length
        known = tuple(request.tokens[start:end])
        if len(known) < count:
            known += (UNKNOWN_TOKEN,) * (count - len(known))
        scored = 0 if request.score_from is None else request.scored_by(start, end)
        full_table = None
        if held is not None or not self._books.knows_table(request):
            full_table = (*table[:first_new], *new_blocks)
        self._entries.append(
            PlannedRequest(
                request.id,
                start,
                count,
                known,
                full_table,
                first_new,
                new_blocks,
                scored + (request.draft_tokens + 1 if catches_up else 0),
                (request.id, *self._books.children_of(request)) if catches_up else (),
                scored,
            )
        )
        self._budget = max(0, self._budget - count)

    # ---- blocks ----

    def _blocks_to_take(self, table: list[int] | tuple[int, ...], start: int, end: int) -> tuple[int | None, int]:
        """What a table needs to write [start, end).

        Returns:
            Index of a block of it to copy, because it is not the table's alone, or None; and how many blocks to add.
        """
        grown = self._books.pool.blocks_for(end) - len(table)
        index = start // self._block_size
        if index >= len(table):
            return None, grown
        # A cached block may be looked up by others: its content must stay what its hash says.
        return None if self.draft.can_write(table[index]) else index, grown if grown > 0 else 0

    def _take_blocks(self, table: list[int] | tuple[int, ...], start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Take what a table needs to write [start, end). Returns the first index that changes, and its new blocks."""
        index, grown = self._blocks_to_take(table, start, end)
        if index is None:
            return len(table), self.draft.take(grown) if grown else ()
        new_blocks = self.draft.take(1 + grown)
        self._copies.append((table[index], new_blocks[0]))
        self.draft.replace(table[index])
        return index, new_blocks

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt the newest until the blocks for `count` tokens are free. False if that was `request` itself."""
        copied, grown = self._blocks_to_take(request.blocks, request.computed, request.computed + count)
        while not self.draft.can_take(grown + (copied is not None)):
            victim = self._next_victim()
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reclaim_for(self, request: Request, shared: list[int]) -> bool:
        """For a request that cannot be admitted while nothing else computes: take blocks of those that only hold them.

        Without this, requests that wait for each other's next token (a lockstep call larger than the pool) would wait
        for ever.
        """
        if self._entries or self._books.running:
            return False
        while not self._can_admit(request, shared):
            victim = self._next_victim(spare=request)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _next_victim(self, spare: Request | None = None) -> Request | None:
        """The newest request that holds blocks and has not been dealt with in this plan."""
        if self._candidates is None:
            self._candidates = sorted(self._books.holders(), key=lambda request: request.order)
        planned = {entry.id for entry in self._entries}
        while self._candidates:
            victim = self._candidates.pop()
            if victim is not spare and victim.id not in planned:
                return victim
        return None

    def _preempt(self, victim: Request) -> None:
        stored = sum(len(blocks) for _, blocks in self._stores)
        swapped = self._books.policy.should_swap(victim, stored)
        self.victims[victim] = swapped
        if swapped:
            self._stores.append((victim.id, tuple(victim.blocks)))
        self.draft.release(reversed(victim.blocks))

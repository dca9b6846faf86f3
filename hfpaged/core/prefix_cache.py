"""PrefixCache: finding blocks whose content a request would compute again, or that another is about to compute."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfpaged.core.block_pool import BlockPool, PoolDraft

if TYPE_CHECKING:
    from hfpaged.core.request import Request


def root_key(*parts: object) -> bytes:
    """Root of a hash chain: whatever changes keys and values beside the tokens (weights, adapters, a caller's salt)."""
    return hashlib.sha256(repr(parts).encode()).digest()


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block: its tokens and, through `parent`, all that come before.

    SHA-256, since a collision would show one caller another's text.
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has for a request.

    Attributes:
        blocks: the longest cached chain from its start.
        pending: hash of the last block of its prefix that another request is about to compute; None if none is.
    """

    blocks: list[int]
    pending: bytes | None = None


class PrefixCache:
    """Cached blocks by hash chain, and the blocks that admitted requests have claimed to compute.

    A request whose next block is claimed parks until the block is there, so that requests submitted together compute
    their common prefix once. Blocks are only ever found by their whole chain; eviction may leave holes, which end the
    chain early.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._claimant: dict[bytes, int] = {}
        self._claims: dict[int, list[bytes]] = {}
        self._parked: dict[bytes, list[Request]] = {}

    # ---- questions ----

    def look_up(self, request: Request, draft: PoolDraft, claimed_in_plan: dict[bytes, int]) -> PrefixHit:
        """Blocks that `request` can share. Tokens whose logits are needed are left to compute, at least one.

        Args:
            draft: a block that it takes is cached no more.
            claimed_in_plan: blocks that requests admitted in the same plan will compute.
        """
        if request.cache_root is None:
            return PrefixHit([])
        size = self._pool.block_size
        hashes = request.block_hashes(size, request.most_cached // size)
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._pool.find(block_hash)
            if block is None or block in draft.taken:
                break
            blocks.append(block)
        pending = None
        for block_hash in hashes[len(blocks) :]:
            if block_hash not in self._claimant and block_hash not in claimed_in_plan:
                break
            pending = block_hash
        return PrefixHit(blocks, pending)

    @property
    def parked(self) -> list[Request]:
        """Requests that wait for somebody's block."""
        return [request for requests in self._parked.values() for request in requests]

    @property
    def claimants(self) -> set[int]:
        """Ids of requests that have claimed blocks."""
        return set(self._claims)

    # ---- actions ----

    def claim(self, request: Request) -> None:
        """`request` was admitted: it will compute those of its full blocks that are not cached."""
        if request.cache_root is None:
            return
        hashes = request.block_hashes(self._pool.block_size, len(request.tokens) // self._pool.block_size)
        mine = [
            one for one in hashes[request.published :] if one not in self._claimant and self._pool.find(one) is None
        ]
        self._claimant.update(dict.fromkeys(mine, request.id))
        self._claims[request.id] = mine

    def park(self, request: Request, pending: bytes) -> bool:
        """Keep `request` until `pending` is there. False if nobody is about to compute it (any more)."""
        if pending not in self._claimant:
            return False
        self._parked.setdefault(pending, []).append(request)
        return True

    def unpark(self, request: Request) -> None:
        """Forget a parked request."""
        for pending, requests in self._parked.items():
            if request in requests:
                requests.remove(request)
                if not requests:
                    del self._parked[pending]
                return

    def publish(self, request: Request) -> list[Request]:
        """Enter the full, verified blocks that `request` has computed since the last time.

        Returns:
            Requests that were parked for them.
        """
        size = self._pool.block_size
        verified = len(request.tokens) - request.draft_tokens
        full = min(request.computed, verified) // size
        if request.cache_root is None or full <= request.published:
            return []
        hashes = request.block_hashes(size, full)
        woken: list[Request] = []
        for index in range(request.published, full):
            self._pool.cache(request.blocks[index], hashes[index])
            if self._claimant.get(hashes[index]) == request.id:
                del self._claimant[hashes[index]]
                woken += self._parked.pop(hashes[index], [])
        request.published = full
        return woken

    def abandon(self, request: Request) -> list[Request]:
        """`request` will not compute what it claimed. Returns the requests that were parked for it."""
        woken: list[Request] = []
        for block_hash in self._claims.pop(request.id, ()):
            if self._claimant.get(block_hash) == request.id:
                del self._claimant[block_hash]
                woken += self._parked.pop(block_hash, [])
        return woken

    def reset(self) -> None:
        """Forget all cached content. Blocks that requests hold stay theirs; claims stand."""
        self._pool.forget_all()

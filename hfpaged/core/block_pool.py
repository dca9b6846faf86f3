"""BlockPool: who holds which block. Reference counts, and free blocks in the order they will be reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from hfpaged.errors import InvariantError, RequestTooLargeError


class BlockPool:
    """Blocks are ids from 0; what is in them is not the pool's business.

    Free blocks are kept in one order of reuse. A block that is freed without being cached, or whose content is
    forgotten, goes to the front, so that memory already touched is used again first; a cached one goes to the back,
    which makes eviction least recently used.

    Planning never changes the pool: it works on a `PoolDraft`, and `apply` makes a draft real.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    # ---- questions ----

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by its hash, held ones included."""
        return len(self._hash_of)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request of so many tokens that could not run even alone.

        Raises:
            RequestTooLargeError: with both numbers of blocks.
        """
        needed = self.blocks_for(num_tokens)
        if needed > self.num_blocks:
            raise RequestTooLargeError(needed, self.num_blocks)

    def references(self, block: int) -> int:
        """How many block tables contain the block."""
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block can be found by its hash."""
        return block in self._hash_of

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, or None."""
        return self._block_of.get(block_hash)

    def reuse_order(self) -> Iterator[int]:
        """Free blocks, the next to be reused first."""
        return iter(self._free)

    # ---- actions ----

    def apply(self, draft: PoolDraft) -> None:
        """Make a draft real: take its blocks, add and drop its references."""
        for block in draft.taken:
            self.forget(block)
        for block, change in draft.changes.items():
            before = self._references[block]
            self._references[block] = before + change
            if before == 0 and change > 0:
                self._free.pop(block, None)
            elif before > 0 and before + change == 0:
                self._put_back(block)

    def add_reference(self, block: int) -> None:
        """One more table contains a block that some table contains already."""
        if self._references[block] < 1:
            raise InvariantError(f"block {block} is shared, but nobody holds it")
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. Callers pass a table's blocks last first, so that its prefix is evicted last."""
        for block in blocks:
            if self._references[block] < 1:
                raise InvariantError(f"block {block} is freed, but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._put_back(block)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Let a full block be found by its hash. The first block with a content keeps the name."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """The block's content is given up: it cannot be found by its hash any more."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def forget_all(self) -> None:
        """No block can be found by its hash any more."""
        for block in self._hash_of:
            if block in self._free:
                self._free.move_to_end(block, last=False)
        self._hash_of.clear()
        self._block_of.clear()

    def _put_back(self, block: int) -> None:
        self._free[block] = None
        if block not in self._hash_of:
            self._free.move_to_end(block, last=False)


class PoolDraft:
    """Changes that one plan would make to a pool. Costs time in proportion to the blocks it touches.

    Attributes:
        taken: blocks whose old content is given up, in the order they were taken.
        changes: change of reference count of each touched block.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._unread = pool.reuse_order()
        self._released: list[int] = []
        self._replaced: set[int] = set()
        self.taken: dict[int, None] = {}
        self.changes: dict[int, int] = {}
        self.num_free = pool.num_free

    def references(self, block: int) -> int:
        """How many tables would contain the block."""
        return self._pool.references(block) + self.changes.get(block, 0)

    def can_take(self, count: int) -> bool:
        """Whether `count` blocks are free."""
        return count <= self.num_free

    def can_write(self, block: int) -> bool:
        """Whether the one table that contains `block` may write to it: nobody else can see what is in it."""
        # Steps ask for every request; calls would be most of the time.
        pool = self._pool
        is_cached = block in pool._hash_of and block not in self.taken
        return not is_cached and pool._references[block] + self.changes.get(block, 0) == 1

    def take(self, count: int) -> tuple[int, ...]:
        """Take free blocks, given back by this draft first. Ask `can_take` before."""
        return tuple(self._take_one() for _ in range(count))

    def share(self, block: int) -> None:
        """One more table contains `block`, which may be free as long as its content is still there."""
        if self.references(block) == 0:
            self.num_free -= 1
        self._change(block, +1)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; blocks that nobody holds then can be taken again at once."""
        for block in blocks:
            self._change(block, -1)
            if self.references(block) == 0 and block not in self._replaced:
                self.num_free += 1
                self._released.append(block)

    def replace(self, block: int) -> None:
        """Drop one reference to a block that its table replaces by a copy.

        Even if nobody holds it then, this plan cannot take it: should the plan fail, its table still needs it.
        """
        self._replaced.add(block)
        self._change(block, -1)

    def _take_one(self) -> int:
        block = self._next_free()
        self.num_free -= 1
        self.taken[block] = None
        self._change(block, +1)
        return block

    def _next_free(self) -> int:
        while self._released:
            block = self._released.pop()
            if self.references(block) == 0:
                return block
        return next(block for block in self._unread if self.references(block) == 0 and block not in self.changes)

    def _change(self, block: int, by: int) -> None:
        self.changes[block] = self.changes.get(block, 0) + by

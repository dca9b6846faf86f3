"""Where the KV of a preempted request goes: the block store interface, and its first user, host memory.

A remote or disk tier implements the same five verbs. Calls come from the stepping thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from hfpaged.runtime.block_mover import BlockContent


class BlockStore(ABC):
    """Keeps the content of KV blocks outside the pool, bit for bit."""

    @abstractmethod
    def can_store(self, num_blocks: int) -> bool:
        """Back-pressure: whether there is room for this many blocks more. Asked before a plan decides to store."""

    @abstractmethod
    def store(self, key: Hashable, num_blocks: int, content: BlockContent) -> None:
        """Keep `content` under `key`. Storing under a key again replaces it (a repeated step)."""

    @abstractmethod
    def look_up(self, key: Hashable) -> int:
        """Number of blocks kept under `key`; 0 if none."""

    @abstractmethod
    def load(self, key: Hashable) -> BlockContent:
        """What was stored under `key`. It stays until `complete`: a load may be repeated."""

    @abstractmethod
    def complete(self, key: Hashable) -> None:
        """The content under `key` is needed no more. Unknown keys are ignored."""


class HostBlockStore(BlockStore):
    """Blocks in host memory, at most `capacity` of them."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._content: dict[Hashable, tuple[int, BlockContent]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks kept now."""
        # The statistics are read from other threads: a list is made in one go, a generator is not.
        return sum(count for count, _ in list(self._content.values()))

    def can_store(self, num_blocks: int) -> bool:
        return self.num_blocks + num_blocks <= self.capacity

    def store(self, key: Hashable, num_blocks: int, content: BlockContent) -> None:
        self._content[key] = (num_blocks, content)

    def look_up(self, key: Hashable) -> int:
        return self._content[key][0] if key in self._content else 0

    def load(self, key: Hashable) -> BlockContent:
        return self._content[key][1]

    def complete(self, key: Hashable) -> None:
        self._content.pop(key, None)

"""Iterators over the tokens of a request, for threads and for event loops.

They are no generators: leaving a `for` loop early, or dropping one, must not end a request that somebody else waits
for. Closing one does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfpaged.runtime.handle import GenerationHandle


class TokenIterator:
    """Token ids as they are drawn. Raises what ended the request in error, after the last token."""

    def __init__(self, handle: GenerationHandle):
        self._handle = handle
        self._read = 0

    def __iter__(self) -> TokenIterator:
        return self

    def __next__(self) -> int:
        token = self._handle.wait_for_token(self._read)
        if token is None:
            raise StopIteration
        self._read += 1
        return token

    def close(self) -> None:
        """Cancel the request, if it still runs."""
        self._handle.cancel()


class AsyncTokenIterator:
    """The same for an event loop."""

    def __init__(self, handle: GenerationHandle):
        self._handle = handle
        self._read = 0
        self._ready: deque[int] = deque()

    def __aiter__(self) -> AsyncTokenIterator:
        return self

    async def __anext__(self) -> int:
        if not self._ready:
            self._ready.extend(await self._handle.tokens_after(self._read))
            self._read += len(self._ready)
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Cancel the request, if it still runs."""
        self._handle.cancel()

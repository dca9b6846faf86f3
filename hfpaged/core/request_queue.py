"""RequestQueue: requests in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from hfpaged.core.request import Request


class RequestQueue:
    """By priority, and by arrival among equals. Iterates over the requests, the one to be served first before others.

    Entering and leaving take time in proportion to the logarithm of its length, but for moving the list's entries.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The one to be served first. The queue must not be empty."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        del self._requests[bisect_left(self._requests, _order(request), key=_order)]


def _order(request: Request) -> tuple[int, int]:
    return request.order

"""TokenHistory: a row's growing token list as an int64 array, without converting the whole list at every token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 256


class TokenHistory:
    """Mirror of one append-only token list.

    Handing over another list object starts over, so a caller that passes a fresh copy each time is right, only slower.
    """

    def __init__(self) -> None:
        self._source: Sequence[int] | None = None
        self._buffer = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._length = 0

    def update(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """The tokens as int64[len(tokens)]: a view that later appends leave as it is. Do not write to it."""
        if tokens is not self._source or len(tokens) < self._length:
            self._source = tokens
            # A new buffer, because views of the old one may still be in use.
            self._buffer = np.empty(max(_FIRST_CAPACITY, len(tokens)), dtype=np.int64)
            self._length = 0
        length = len(tokens)
        if length > len(self._buffer):
            grown = np.empty(2 * length, dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        if length > self._length:
            self._buffer[self._length : length] = tokens[self._length :]
            self._length = length
        return self._buffer[:length]

"""The head's weight with a copy in 8 bits, which spares greedy steps most of it (csrc/head_screen.h)."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from hfpaged.errors import NativeKernelError
from hfpaged.program import abi
from hfpaged.program.description import LogitScaling
from hfpaged.program.panels import PackedMatrix, Part

# Products of bytes are summed in 32 bits.
MOST_IN_FEATURES = 1 << 16


def can_screen(scaling: LogitScaling, in_features: int) -> bool:
    """Whether what the head does to its product certainly leaves larger ones larger, and the kernels can bound it."""
    keeps_order = scaling.multiplier > 0 and scaling.divisor > 0 and scaling.softcap == 0
    return keeps_order and in_features <= MOST_IN_FEATURES


class ScreenedMatrix(PackedMatrix):
    """A packed weight and its screen, filled together.

    Attributes:
        screen: the struct for the kernels. Valid as long as this object lives.
    """

    def __init__(self, library: ctypes.CDLL, parts: list[Part], dtype: torch.dtype):
        super().__init__(library, parts, dtype)
        columns = self.weight.columns
        quads = -(-parts[0].linear.in_features // 4)
        self._panels_bytes, self._codes_bytes = self.num_bytes, columns * quads * 4
        codes = library.hfp_panels_allocate(self._codes_bytes)
        if not codes:
            raise NativeKernelError(f"out of memory: {self._codes_bytes} bytes for a head in 8 bits")
        weakref.finalize(self, library.hfp_panels_free, codes, self._codes_bytes)
        self._bounds = np.zeros((3, columns), dtype=np.float32)
        self.screen = abi.HeadScreen(codes, *(row.ctypes.data for row in self._bounds), columns, quads)
        self.num_bytes += self._codes_bytes

    def unread_bytes(self, rows: int) -> int:
        """What a step of that many sampled rows does not read, but for a few panels."""
        return self._panels_bytes if rows <= self._library.hfp_screen_rows() else self._codes_bytes

    def pack(self, num_threads: int) -> None:
        """As of any packed weight."""
        super().pack(num_threads)
        self._library.hfp_screen_fill(
            ctypes.byref(self.screen), ctypes.byref(self.weight), abi.DTYPE_CODES[self._dtype], num_threads
        )

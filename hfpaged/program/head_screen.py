"""The head's weight with a copy in 8 bits, which spares steps of few rows most of it (csrc/head_screen.h)."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from hfpaged.errors import NativeKernelError
from hfpaged.program import abi
from hfpaged.program.description import LogitScaling
from hfpaged.program.panels import PackedMatrix, Part

# Rows of a step beyond which the kernels do not use a screen.
SCREEN_ROWS = 4


def can_screen(scaling: LogitScaling) -> bool:
    """Whether what the head does to its product certainly leaves larger ones larger."""
    return scaling.multiplier > 0 and scaling.divisor > 0 and scaling.softcap == 0


class ScreenedMatrix(PackedMatrix):
    """A packed weight and its screen, filled together.

    Attributes:
        screen: the struct for the kernels. Valid as long as this object lives.
    """

    def __init__(self, library: ctypes.CDLL, parts: list[Part], dtype: torch.dtype):
        super().__init__(library, parts, dtype)
        columns = self.weight.columns
        pairs = (parts[0].linear.in_features + 1) // 2
        self._panels_bytes, self._codes_bytes = self.num_bytes, columns * pairs * 2
        codes = library.hfp_panels_allocate(self._codes_bytes)
        if not codes:
            raise NativeKernelError(f"out of memory: {self._codes_bytes} bytes for a head in 8 bits")
        weakref.finalize(self, library.hfp_panels_free, codes, self._codes_bytes)
        self._scales, self._errors = (np.zeros(columns, dtype=np.float32) for _ in range(2))
        self.screen = abi.HeadScreen(codes, self._scales.ctypes.data, self._errors.ctypes.data, pairs)
        self.num_bytes += self._codes_bytes

    def unread_bytes(self, rows: int) -> int:
        """What a step of that many sampled rows does not read, but for a few panels."""
        return self._panels_bytes if rows <= SCREEN_ROWS else self._codes_bytes

    def pack(self, num_threads: int) -> None:
        """As of any packed weight."""
        super().pack(num_threads)
        self._library.hfp_screen_fill(
            ctypes.byref(self.screen), ctypes.byref(self.weight), abi.DTYPE_CODES[self._dtype], num_threads
        )

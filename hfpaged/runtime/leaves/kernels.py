"""LeafKernels: the native library as the leaves of one model call it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hfpaged.native import library as native_library
from hfpaged.runtime.leaves import abi


class LeafKernels:
    """Shared by all leaves of a model, which one thread runs.

    Attributes:
        library: with the entry points of csrc/leaf.h.
        threads: most threads of a call at present; small calls use fewer.
    """

    def __init__(self) -> None:
        self.library: ctypes.CDLL = abi.declare(native_library.load())
        self.threads = torch.get_num_threads()

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Have everything that the calling thread runs meanwhile, PyTorch's operations too, use this many threads.

        With teams of one size: GNU's OpenMP ends threads when the next team is smaller, and starts them again later.
        """
        before, self.threads = self.threads, threads
        self.library.hfp_leaf_use_threads(threads)
        try:
            yield
        finally:
            self.threads = before
            self.library.hfp_leaf_use_threads(before)

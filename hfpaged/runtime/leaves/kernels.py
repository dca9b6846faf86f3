"""LeafKernels: the native library as the leaves of one model call it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hfpaged.native import library as native_library
from hfpaged.program import abi
from hfpaged.program.panels import PackedMatrix
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.leaves.leaf_program import LeafProgram
from hfpaged.runtime.leaves.usage import CpuUsage


class LeafKernels:
    """Shared by all leaves of a model, which one thread runs.

    Attributes:
        library: the native library.
        usage: how much of the CPU the threads of the leaves got.
    """

    def __init__(self) -> None:
        self.library: ctypes.CDLL = abi.declare(native_library.load())
        self.usage = CpuUsage()
        self._threads = torch.get_num_threads()
        self._programs: dict[torch.dtype, LeafProgram] = {}

    @property
    def threads(self) -> int:
        """Most threads of a call at present; small calls use one."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        for program in self._programs.values():
            program.threads = count

    def program(self, dtype: torch.dtype) -> LeafProgram:
        """The operations of all leaves that compute in `dtype`."""
        if dtype not in self._programs:
            self._programs[dtype] = LeafProgram(self.library, dtype, self.usage)
            self._programs[dtype].threads = self._threads
        return self._programs[dtype]

    def clear(self) -> None:
        """Forget the operations of all leaves, which must not be used any more."""
        self._programs.clear()

    def refresh(self) -> None:
        """Take over the present weights of all leaves.

        Raises:
            NotRecognized: a weight changed its shape, dtype or device.
        """
        for program in self._programs.values():
            program.native.refresh(None, self._threads)

    @property
    def packed_matrices(self) -> list[PackedMatrix]:
        """The packed weights of all leaves."""
        return [matrix for program in self._programs.values() for matrix in program.native.packed_matrices]

    @contextmanager
    def stepping(self, batch: StepBatch, threads: int, by_rows: bool) -> Iterator[None]:
        """Run a step of the model: attention layers attend to the requests of `batch`.

        Everything that the calling thread runs meanwhile, PyTorch's operations too, uses this many threads, in teams of
        one size: GNU's OpenMP ends threads when the next team is smaller, and starts them again later.
        """
        before, self.threads = self._threads, threads
        self.library.hfp_use_threads(threads)
        self.usage.clear()
        try:
            for program in self._programs.values():
                program.by_rows = by_rows
                program.begin(batch)
            yield
        finally:
            for program in self._programs.values():
                program.end()
            self.threads = before
            self.library.hfp_use_threads(before)

"""One matrix product as a program of its own, to test kernels without a model."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import nn

from hfpaged.native import library as native_library
from hfpaged.program import abi
from hfpaged.program.description import Linear
from hfpaged.program.panels import PackedMatrix, interleaved_halves, side_by_side


class NativeProduct:
    """out = epilogue(x @ weight.T + bias) through a program with a single operation."""

    def __init__(self, linear: nn.Linear, up: nn.Linear | None = None, **fields: object):
        self._library = abi.declare(native_library.load())
        self._dtype = linear.weight.dtype
        parts = side_by_side([Linear(linear)]) if up is None else interleaved_halves(Linear(linear), Linear(up))
        self._matrix = PackedMatrix(self._library, parts, self._dtype)
        self._matrix.pack(1)
        self._in, self._out = linear.in_features, linear.out_features
        self._program = self._library.hfp_program_create(abi.DTYPE_CODES[self._dtype])
        for width in (self._in, self._out, self._out):
            self._library.hfp_program_add_buffer(self._program, width, abi.RowSet.TOKENS)
        op = abi.ProductOp(self._matrix.weight, 0, 1, self._out, 0, 0, 1.0, -1)
        for name, value in fields.items():
            setattr(op, name, value)
        self._library.hfp_program_add_op(self._program, abi.OpKind.PRODUCT, ctypes.byref(op), ctypes.sizeof(op))

    def __del__(self) -> None:
        self._library.hfp_program_destroy(self._program)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, other: torch.Tensor | None = None, threads: int = 1
    ) -> torch.Tensor:
        """x [M, K]; out and other [M, N] are what those buffers hold before. Returns [M, N]."""
        step = self._step(len(x), threads)
        self._run(step, end=0)
        self._buffer(0, len(x), self._in).copy_(x)
        for index, content in ((1, out), (2, other)):
            if content is not None:
                self._buffer(index, len(x), self._out).copy_(content)
        self._run(step, end=1)
        return self._buffer(1, len(x), self._out).clone()

    def _step(self, rows: int, threads: int) -> abi.Step:
        step = abi.Step()
        step.tokens, step.threads = rows, threads
        self._zeros = np.zeros(rows, dtype=np.int64)
        step.token_ids = step.positions = self._zeros.ctypes.data
        return step

    def _run(self, step: abi.Step, end: int) -> None:
        step.end_op = end
        assert self._library.hfp_program_run(self._program, ctypes.byref(step)) == 0

    def _buffer(self, index: int, rows: int, width: int) -> torch.Tensor:
        stride = ctypes.c_int64()
        address = self._library.hfp_program_buffer(self._program, index, ctypes.byref(stride))
        memory = (ctypes.c_uint8 * (rows * stride.value * self._dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self._dtype).view(rows, stride.value)[:, :width]

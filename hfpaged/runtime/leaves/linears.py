"""Linears: linear modules that read the same input, as one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from hfpaged.program.abi import DTYPE_CODES
from hfpaged.program.description import Linear
from hfpaged.program.panels import PackedMatrix, side_by_side
from hfpaged.runtime.leaves.abi import LeafLinear, LeafLinears
from hfpaged.runtime.leaves.kernels import LeafKernels


class Linears:
    """Products of one input with the packed weights of several linear modules.

    Attributes:
        in_features: elements of a row of the input.
        dtype: of weights, input and outputs.
        matrices: the packed weight of each module. Their structs, for other kernels, are valid as long as they live.
    """

    def __init__(
        self, kernels: LeafKernels, linears: Sequence[Linear], out_shapes: Sequence[tuple[int, ...]] | None = None
    ):
        """Pack the present weights.

        Args:
            out_shapes: what becomes of a row in each output; default: (out_features,).
        """
        self.in_features = linears[0].weight.shape[1]
        self.dtype = linears[0].weight.dtype
        self._kernels = kernels
        self._out_shapes = tuple(out_shapes or ((linear.out_features,) for linear in linears))
        self.matrices = [PackedMatrix(kernels.library, side_by_side([linear]), self.dtype) for linear in linears]
        self._outputs = (LeafLinear * len(linears))(
            *(
                LeafLinear(matrix.weight, None, linear.out_features)
                for matrix, linear in zip(self.matrices, linears, strict=True)
            )
        )
        # Views of the structs: making one anew at each access would cost more than filling it.
        self._views = tuple(zip(self._out_shapes, self._outputs, strict=True))
        self._args = LeafLinears(linears=self._outputs, count=len(linears))
        self._input = self._args.input
        self._input.width, self._input.dtype = self.in_features, DTYPE_CODES[self.dtype]
        self._address = ctypes.addressof(self._args)
        self._run = kernels.library.hfp_leaf_linears
        self.refresh()

    def refresh(self) -> None:
        """Take over the present weights.

        Raises:
            NotRecognized: a weight changed its shape, dtype or device.
        """
        for matrix in self.matrices:
            matrix.pack(self._kernels.threads)

    def __call__(self, x: torch.Tensor, lead: tuple[int, ...]) -> list[torch.Tensor]:
        """The output of each module, contiguous, [*lead, *its out_shape].

        Args:
            x: contiguous, in `dtype`, rows of `in_features` elements.
            lead: shape of the rows.
        """
        rows = self._input
        rows.data, rows.rows, rows.threads = x.data_ptr(), x.numel() // self.in_features, self._kernels.threads
        outputs = []
        for shape, linear in self._views:
            out = x.new_empty(*lead, *shape)
            linear.out = out.data_ptr()
            outputs.append(out)
        self._run(self._address)
        return outputs

"""Packed copies of weight matrices, in the panels of csrc/gemm.h."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hfpaged.errors import NativeKernelError
from hfpaged.program.abi import DTYPE_CODES, STEP_BYTES, PackedWeight
from hfpaged.program.description import Linear, NotRecognized

PANEL_COLUMNS = 64


@dataclass(frozen=True)
class Part:
    """A linear module and the packed column of each of its (selected) rows, int32 [out_features]."""

    linear: Linear
    columns: np.ndarray


def side_by_side(linears: Iterable[Linear]) -> list[Part]:
    """One linear after the other."""
    parts, first = [], 0
    for linear in linears:
        parts.append(Part(linear, np.arange(first, first + linear.out_features, dtype=np.int32)))
        first += linear.out_features
    return parts


def interleaved_halves(gate: Linear, up: Linear) -> list[Part]:
    """Panels of 32 gate columns and the 32 up columns that they multiply: operand of Epilogue.GATED."""
    half = PANEL_COLUMNS // 2
    index = np.arange(gate.out_features, dtype=np.int32)
    columns = index // half * PANEL_COLUMNS + index % half
    return [Part(gate, columns), Part(up, columns + half)]


class PackedMatrix:
    """One packed weight: memory of its own, filled by `pack` from the present weights of the parts.

    Attributes:
        weight: the struct for the kernels. Valid as long as this object lives.
        num_bytes: size of the copy.
        num_elements: of the weights in it.
        parts: linear modules that it holds, or rows of them.
    """

    def __init__(self, library: ctypes.CDLL, parts: list[Part], dtype: torch.dtype):
        self._library = library
        self.parts = parts
        self._dtype = dtype
        self._in_features = parts[0].linear.weight.shape[1]
        panels = -(-(1 + max(int(part.columns.max()) for part in parts)) // PANEL_COLUMNS)
        depth = self._in_features if dtype == torch.float32 else (self._in_features + 1) // 2
        self.num_bytes = panels * depth * STEP_BYTES
        self._address = library.hfp_panels_allocate(self.num_bytes)
        if not self._address:
            raise NativeKernelError(f"out of memory: {self.num_bytes} bytes for a packed weight")
        weakref.finalize(self, library.hfp_panels_free, self._address, self.num_bytes)
        self._bias = None
        if any(part.linear.bias is not None for part in parts):
            self._bias = np.zeros(panels * PANEL_COLUMNS, dtype=np.float32)
        bias_address = None if self._bias is None else self._bias.ctypes.data
        self.num_elements = self._in_features * sum(part.linear.out_features for part in parts)
        self.weight = PackedWeight(self._address, None, bias_address, panels * PANEL_COLUMNS, depth)

    def uses(self, modules: set[nn.Module]) -> bool:
        """Whether a part of it belongs to one of `modules`."""
        return any(part.linear.module in modules for part in self.parts)

    def pack(self, num_threads: int) -> None:
        """Copy the weights as they are now.

        Raises:
            NotRecognized: a weight changed its shape, dtype or device, so the program must be built anew.
        """
        for part in self.parts:
            weight, bias = part.linear.weight.detach(), part.linear.bias
            self._require_same_kind(weight, part)
            rows = part.linear.rows
            weight = (weight if rows is None else weight[rows]).contiguous()
            self._library.hfp_panels_pack(
                weight.data_ptr(),
                DTYPE_CODES[weight.dtype],
                weight.shape[0],
                self._in_features,
                weight.stride(0) * weight.element_size(),
                part.columns.ctypes.data,
                self._address,
                num_threads,
            )
            if bias is not None:
                values = bias.detach().float()
                self._bias[part.columns] = (values if rows is None else values[rows]).numpy()

    def unpack(self, part: Part) -> torch.Tensor:
        """[out_features, in_features] of one of the parts, bit for bit as last packed; only its selected rows."""
        weight = torch.empty(len(part.columns), self._in_features, dtype=self._dtype)
        self._library.hfp_panels_unpack(
            self._address,
            DTYPE_CODES[self._dtype],
            weight.shape[0],
            self._in_features,
            part.columns.ctypes.data,
            weight.data_ptr(),
            torch.get_num_threads(),
        )
        return weight

    def _require_same_kind(self, weight: torch.Tensor, part: Part) -> None:
        rows = part.linear.rows
        wanted = (len(part.columns) if rows is None else weight.shape[0], self._in_features)
        if weight.dtype != self._dtype or tuple(weight.shape) != wanted or weight.device.type != "cpu":
            raise NotRecognized(
                f"a weight is {weight.dtype} {tuple(weight.shape)} on {weight.device} "
                f"where {self._dtype} {wanted} on cpu was packed"
            )
        if (part.linear.bias is not None) and self._bias is None:
            raise NotRecognized("a linear module got a bias after it was packed")

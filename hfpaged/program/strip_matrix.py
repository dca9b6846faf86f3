"""Weights in 4 bits as one matrix of a program: addresses of the modules' own strips (csrc/strips.h), no copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from hfpaged.program.abi import PackedWeight
from hfpaged.program.description import Linear, NotRecognized
from hfpaged.program.panels import PANEL_COLUMNS, Part
from hfpaged.quantization.native_strips import Strip, strip_array, strip_weight, strips_of
from hfpaged.quantization.packed_linear import PackedLinear
from hfpaged.quantization.strips import STRIP


class StripMatrix:
    """Strips of several packed modules in the order of a product's columns.

    Attributes:
        weight: the struct for the kernels, right after `pack`. Valid as long as this object and the modules live.
        num_bytes: of the modules' packed weights.
        num_elements: weights in them.

    Raises:
        NotRecognized: the parts differ in format or group, or their columns are no whole strips.
    """

    def __init__(self, parts: list[Part]):
        self._parts = parts
        modules = [part.linear.packed for part in parts]
        if any(module is None for module in modules):
            raise NotRecognized("weights in 4 bits and dense ones are side by side")
        if len({(module.format, module.group, module.in_features) for module in modules}) > 1:
            raise NotRecognized("weights in different 4-bit formats are side by side")
        self._first: PackedLinear = modules[0]
        self._places = [_strip_places(part) for part in parts]
        panels = -(-(1 + max(int(part.columns.max()) for part in parts)) // PANEL_COLUMNS)
        self.num_bytes = sum(module.num_bytes for module in modules)
        self.num_elements = sum(part.linear.out_features * part.linear.in_features for part in parts)
        self._bias = np.zeros(panels * PANEL_COLUMNS, dtype=np.float32) if _any_bias(parts) else None
        self._array = strip_array([Strip()] * (panels * PANEL_COLUMNS // STRIP))
        self._strips = strip_weight(self._array, self._first.format, self._first.group, self._first.in_features)
        bias_address = None if self._bias is None else self._bias.ctypes.data
        self.weight = PackedWeight(None, ctypes.addressof(self._strips), bias_address, panels * PANEL_COLUMNS, 0)
        self._point()

    def uses(self, modules: set[nn.Module]) -> bool:
        """Whether a part of it belongs to one of `modules`."""
        return any(part.linear.module in modules for part in self._parts)

    def pack(self, num_threads: int) -> None:
        """Take the modules' present buffers and biases."""
        self._point()
        for part in self._parts:
            bias = part.linear.bias
            if bias is not None:
                if self._bias is None:
                    raise NotRecognized("a linear module got a bias after it was packed")
                values = bias.detach().float()
                self._bias[part.columns] = (values if part.linear.rows is None else values[part.linear.rows]).numpy()

    def _point(self) -> None:
        spare = None
        filled = set()
        for part, places in zip(self._parts, self._places, strict=True):
            module = part.linear.packed
            strips = strips_of(module.codes, module.scales, module.global_scale)
            spare = strips[0]
            for source, place in places:
                self._array[place] = strips[source]
                filled.add(place)
        # Columns of the last panel that nobody looks at.
        for place in set(range(len(self._array))) - filled:
            self._array[place] = spare


def _any_bias(parts: list[Part]) -> bool:
    return any(part.linear.bias is not None for part in parts)


def _strip_places(part: Part) -> list[tuple[int, int]]:
    """(strip of the module, strip of the matrix) of every strip of a part."""
    return list(_each_strip_place(part.linear, part.columns))


def _each_strip_place(linear: Linear, columns: np.ndarray) -> Iterator[tuple[int, int]]:
    rows = torch.arange(linear.out_features) if linear.rows is None else linear.rows
    rows = rows.numpy()
    for first in range(0, len(rows), STRIP):
        whole = np.arange(len(rows[first : first + STRIP]))
        row, column = int(rows[first]), int(columns[first])
        consecutive = np.array_equal(rows[first : first + STRIP], row + whole) and np.array_equal(
            columns[first : first + STRIP], column + whole
        )
        if not consecutive or row % STRIP or column % STRIP:
            raise NotRecognized(f"the rows of a packed weight are not used in whole strips of {STRIP}")
        yield row // STRIP, column // STRIP

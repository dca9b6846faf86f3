"""Which parameters packed matrices hold whole, and how to read them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hfpaged.program.description import Linear
from hfpaged.program.panels import PackedMatrix, Part


@dataclass(frozen=True)
class PackedCopy:
    """A parameter in the packed matrices that together hold all of it, in its own dtype."""

    places: tuple[tuple[PackedMatrix, Part], ...]

    def read(self, out: torch.Tensor) -> None:
        """Write the numbers, bit for bit as they were packed, to a tensor like the parameter."""
        for matrix, part in self.places:
            rows = slice(None) if part.linear.rows is None else part.linear.rows
            _laid_out(part.linear, out)[rows] = matrix.unpack(part)


def packed_copies(matrices: Iterable[PackedMatrix]) -> dict[tuple[nn.Module, str], PackedCopy]:
    """By module and name, the parameters of which every number is in one of `matrices`."""
    places: dict[tuple[nn.Module, str], list[tuple[PackedMatrix, Part]]] = defaultdict(list)
    for matrix in matrices:
        for part in matrix.parts:
            places[part.linear.module, part.linear.parameter].append((matrix, part))
    return {
        (module, name): PackedCopy(tuple(found))
        for (module, name), found in places.items()
        if _is_whole(getattr(module, name), (part for _, part in found))
    }


def _is_whole(parameter: torch.Tensor, parts: Iterable[Part]) -> bool:
    seen = torch.zeros(parameter.shape, dtype=torch.bool)
    for part in parts:
        rows = slice(None) if part.linear.rows is None else part.linear.rows
        _laid_out(part.linear, seen)[rows] = True
    return bool(seen.all())


def _laid_out(linear: Linear, parameter: torch.Tensor) -> torch.Tensor:
    """[out, in] of a tensor like the parameter of `linear`, in the same memory."""
    if linear.transposed:
        return parameter.t()
    return parameter if linear.expert is None else parameter[linear.expert]

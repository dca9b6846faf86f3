"""Plain descriptions of the values that reach a fused operation. Guards see these, never tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

FLEXIBLE = -1  # a dimension that differs from step to step


@dataclass(frozen=True)
class Operand:
    """One value of an operation.

    Attributes:
        dtype: of the value as the replaced code computes with it. For a norm's gamma this is the *effective* one:
            a module that multiplies by `weight.float() + 1` has an fp32 gamma whatever its parameter is.
        shape: FLEXIBLE where it is not fixed.
        contiguous: whether the last dimension is dense.
        device: type of the device.
        plain: an ordinary tensor or parameter, no subclass that computes something else (a quantized weight).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: bool = True
    device: str = "cpu"
    plain: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Operand:
        """Describe a tensor; `dtype` overrides it where the module converts before it computes."""
        return cls(
            dtype=dtype or tensor.dtype,
            shape=tuple(tensor.shape),
            contiguous=tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1,
            device=tensor.device.type,
            plain=type(tensor) in (torch.Tensor, torch.nn.Parameter),
        )

    @classmethod
    def rows(cls, width: int, dtype: torch.dtype) -> Operand:
        """Activations [any number of rows, width] in memory of the program's own."""
        return cls(dtype, (FLEXIBLE, width))


@dataclass(frozen=True)
class FusionValues:
    """All that a guard may look at.

    Attributes:
        operands: by role, for example "x", "gamma", "out". Absent roles are not part of the operation.
        autocast: dtype that autocast computes in, or None.
        hooked: a replaced module has hooks or a forward of its own on the instance.
        adapted: a replaced module carries an adapter.
        capability: compute capability of the GPU; None: it does not matter.
    """

    operands: Mapping[str, Operand]
    autocast: torch.dtype | None = None
    hooked: bool = False
    adapted: bool = False
    capability: tuple[int, int] | None = None

    def get(self, role: str) -> Operand | None:
        """The operand of a role, or None."""
        return self.operands.get(role)

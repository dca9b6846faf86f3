"""Rotary embeddings of queries and keys as one kernel, in the attention modules that call Transformers' function.

The function is a global of the modeling file, which is not touched: the attention module of a view gets its forward
over again, with globals of its own in which the name stands for the kernel.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.device.sameness import random_rows, require_close

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

FUNCTION = "apply_rotary_pos_emb"
_TOKENS = 8


def rotates(module: nn.Module) -> bool:
    """Whether a module's forward calls Transformers' function."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and FUNCTION in code.co_names


class Angles:
    """The angles of a step's tokens as the kernel reads them, laid out once for all layers that rotate by them."""

    def __init__(self) -> None:
        # Models rotate by two sets of angles at most, in layers that see all and in those that see a window.
        self._last: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque(maxlen=2)

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows int32 [T], table fp32 [T, D]): token i rotates by row i, half cosines and half sines."""
        for known, rows, table in self._last:
            if known is cos:
                return rows, table
        half = cos.shape[-1] // 2
        table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float()
        rows = torch.arange(len(table), dtype=torch.int32, device=table.device)
        self._last.append((cos, rows, table))
        return rows, table


def fused_rotation(module: nn.Module, dtype: torch.dtype, registry: FusionRegistry, angles: Angles) -> MethodType:
    """The module's forward, with the kernel for activations in `dtype` in it.

    Args:
        angles: shared by the modules of a model.

    Raises:
        NotRecognized, FusionRefused: the function is another one, or there is no kernel for it.
    """
    forward = inspect.unwrap(type(module).forward)
    own, dim = forward.__globals__.get(FUNCTION), getattr(module, "head_dim", None)
    if own is None or dim is None:
        raise NotRecognized("its head dimension is not known")
    device = next(module.parameters()).device
    heads = Operand(dtype, (FLEXIBLE, dim), device=device.type)
    registry.admit("flashinfer.rotation", FusionValues({"query": heads, "key": heads}))
    rotation = FusedRotation(own, dtype, dim, angles)
    _require_same(rotation, own, dim, dtype, device)
    copied = FunctionType(
        forward.__code__,
        {**forward.__globals__, FUNCTION: rotation},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)


class FusedRotation:
    """Stands for `apply_rotary_pos_emb` in one dtype and head dimension. For all else it calls that.

    Args:
        own: the function.
    """

    def __init__(self, own: Rotation, dtype: torch.dtype, dim: int, angles: Angles):
        self._own = own
        self._dtype = dtype
        self._dim = dim
        self._angles = angles

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [1, H, T, D] and k [1, Hkv, T, D] by the angles of cos and sin [1, T, D]."""
        if others or options or not self._has_kernel(q, k, cos):
            return self._own(q, k, cos, sin, *others, **options)
        # Transformers hands out transposed views of what is packed by tokens in memory.
        packed = [states[0].transpose(0, 1).reshape(states.shape[2], -1).contiguous() for states in (q, k)]
        rows, table = self._angles.of(cos, sin)
        rotated = flashinfer().rope.apply_rope_with_cos_sin_cache(rows, *packed, self._dim, table, is_neox=True)
        return tuple(states.view(1, len(rows), -1, self._dim).transpose(1, 2) for states in rotated)

    def _has_kernel(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
        return (
            q.dtype is k.dtype is cos.dtype is self._dtype
            and q.shape[0] == k.shape[0] == cos.shape[0] == 1
            and q.shape[-1] == k.shape[-1] == cos.shape[-1] == self._dim
            and q.numel() > 0
        )


def _require_same(rotation: Rotation, own: Rotation, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    heads = random_rows(_TOKENS, 3 * dim, device, dtype).view(1, _TOKENS, 3, dim).transpose(1, 2)
    angles = torch.linspace(0, 40, _TOKENS * (dim // 2), device=device).view(1, _TOKENS, -1)
    angles = torch.cat([angles, angles], dim=-1)
    arguments = heads[:, :2], heads[:, 2:], angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.no_grad():
        for kernel, expected in zip(rotation(*arguments), own(*arguments), strict=True):
            require_close(kernel, expected)

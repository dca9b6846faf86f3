"""RMS normalization modules as one kernel each, instead of half a dozen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.abi import NormKind
from hfpaged.program.description import Norm, NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.device.sameness import random_rows, require_close

Kernel = Callable[..., torch.Tensor]

_ROWS = 8


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has the looks of an RMS norm."""
    parameters = dict(module.named_parameters())
    return list(parameters) == ["weight"] and parameters["weight"].dim() == 1 and "Norm" in type(module).__name__


def fused_norm(module: nn.Module, dtype: torch.dtype, registry: FusionRegistry) -> FusedNorm:
    """The module's forward for activations in `dtype`.

    Raises:
        NotRecognized, FusionRefused: there is no kernel for it.
    """
    norm = identify_norm(module, module.weight.shape[0], dtype)
    forward = FusedNorm(module, _admitted_kernel(norm, dtype, registry), norm.epsilon)
    x = random_rows(_ROWS, norm.width, module.weight.device, dtype)
    with torch.no_grad():
        require_close(forward(x), type(module).forward(module, x))
    return forward


class FusedNorm:
    """Stands for the forward of one module."""

    def __init__(self, module: nn.Module, kernel: Kernel, epsilon: float):
        self._module = module
        self._kernel = kernel
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        if x.dtype is not weight.dtype or x.numel() == 0:
            return type(self._module).forward(self._module, x)
        rows = x.reshape(-1, x.shape[-1])
        if not rows.is_contiguous():
            rows = rows.contiguous()
        return self._kernel(rows, weight, self._epsilon).view(x.shape)


def is_gemma_norm(norm: Norm) -> bool:
    """Whether a norm that has a kernel is of Gemma's kind, which scales by one more than its weight.

    Raises:
        NotRecognized: it has no kernel.
    """
    if norm.kind not in (NormKind.RMS_ROUNDED_THEN_SCALED, NormKind.RMS_SCALED_THEN_ROUNDED):
        raise NotRecognized("there is no kernel for its formula")
    return norm.gamma_offset == 1.0


def _admitted_kernel(norm: Norm, dtype: torch.dtype, registry: FusionRegistry) -> Kernel:
    is_gemma = is_gemma_norm(norm)
    weight = Operand.of(norm.module.weight)
    rows = Operand(dtype, (FLEXIBLE, norm.width), device=weight.device)
    values = FusionValues({"x": rows, "weight": weight, "out": rows})
    registry.admit("flashinfer.gemma_rms_norm" if is_gemma else "flashinfer.rms_norm", values)
    library = flashinfer().norm
    return library.gemma_rmsnorm if is_gemma else library.rmsnorm

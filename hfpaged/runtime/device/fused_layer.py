"""Decoder layers whose first sum and the norm behind it are one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.device.fused_norm import is_gemma_norm, may_be_norm
from hfpaged.runtime.device.layer_flow import LayerFlow
from hfpaged.runtime.device.sameness import random_rows, require_close

# (rows, residual, weight, epsilon): residual += rows; rows = norm(residual).
Kernel = Callable[..., None]

_ROWS = 8


def fused_layer(layer: nn.Module, flow: LayerFlow, dtype: torch.dtype, registry: FusionRegistry) -> FusedLayer:
    """The layer's forward for activations in `dtype`.

    Raises:
        NotRecognized, FusionRefused: there is no kernel for it.
    """
    if not may_be_norm(flow.norm):
        raise NotRecognized("no RMS norm reads the first sum")
    norm = identify_norm(flow.norm, flow.norm.weight.shape[0], dtype)
    is_gemma = is_gemma_norm(norm)
    weight = Operand.of(norm.module.weight)
    rows = Operand(dtype, (FLEXIBLE, norm.width), device=weight.device)
    name = "gemma_fused_add_rmsnorm" if is_gemma else "fused_add_rmsnorm"
    values = FusionValues({"x": rows, "weight": weight, "out": rows, "residual": rows})
    registry.admit(f"flashinfer.{name}", values)
    forward = FusedLayer(layer, flow, getattr(flashinfer().norm, name), norm.epsilon)
    x, residual = (random_rows(_ROWS, norm.width, norm.module.weight.device, dtype) for _ in range(2))
    residual = residual.flip(0).contiguous()
    with torch.no_grad():
        own_sum = residual + x
        own = type(flow.norm).forward(flow.norm, own_sum)
        normed, total = forward.add_and_norm(x, residual)
        require_close(total, own_sum)
        require_close(normed, own)
    return forward


class FusedLayer:
    """Stands for the forward of one layer. Overwrites what it is given, which nobody else reads (see `layer_flows`)."""

    def __init__(self, layer: nn.Module, flow: LayerFlow, kernel: Kernel, epsilon: float):
        self._layer = layer
        self._flow = flow
        self._kernel = kernel
        self._epsilon = epsilon

    def __call__(self, hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args or options.keys() != self._flow.options:
            return type(self._layer).forward(self._layer, hidden, *args, **options)
        x = hidden
        for call in self._flow.before:
            x = call(x, options)
        x, total = self.add_and_norm(x, hidden)
        for call in self._flow.behind:
            x = call(x, options)
        return total + x

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x); both may be overwritten."""
        weight = self._flow.norm.weight
        is_dense = x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
        if not (is_dense and x.dtype is residual.dtype is weight.dtype and x.numel()):
            total = residual + x
            return self._flow.norm(total), total
        width = x.shape[-1]
        self._kernel(x.view(-1, width), residual.view(-1, width), weight, self._epsilon)
        return x, residual

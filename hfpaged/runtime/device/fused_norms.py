"""FusedNorms: the normalization modules of a view as one kernel each, instead of half a dozen."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hfpaged.fusion.flashinfer_catalogue import FLASHINFER_FUSIONS
from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRefused, FusionRegistry
from hfpaged.program.abi import NormKind
from hfpaged.program.description import Norm, NotRecognized
from hfpaged.program.norms import identify_norm
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.view import EngineView

Kernel = Callable[..., torch.Tensor]

_ROWS = 8
# Of the largest element: three roundings to bfloat16.
_TOLERANCE = 3 * 2.0**-8


class FusedNorms:
    """Kernels in the place of the forwards of modules of one view, until this object is dropped.

    Each one was admitted by its guard, and has given its module's own results on random numbers.

    Attributes:
        fused: how many modules.
        refusals: how many others look like one, by "norm: reason".
    """

    def __init__(self, view: EngineView, dtype: torch.dtype):
        self.refusals: Counter[str] = Counter()
        self._registry = FusionRegistry(FLASHINFER_FUSIONS)
        places = []
        for module in view.model.modules():
            if _may_be_norm(module):
                forward = self._fused_forward(module, dtype)
                if forward is not None:
                    places.append((vars(module), forward))
                    vars(module)["forward"] = forward
        self.fused = len(places)
        # A forward refers to its module. Taking it away ends the cycle, and leaves the view as it was.
        weakref.finalize(self, _take_away, places).atexit = False

    def _fused_forward(self, module: nn.Module, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor] | None:
        try:
            norm = identify_norm(module, module.weight.shape[0], dtype)
            kernel = self._admitted_kernel(norm, dtype)
            forward = _Forward(module, kernel, norm)
            _require_equal(module, forward, dtype)
        except (NotRecognized, FusionRefused) as refused:
            self.refusals[f"norm: {refused.reason}"] += 1
            return None
        except Exception as error:  # a kernel that does not compile or run costs its speed and nothing else
            self.refusals[f"norm: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"] += 1
            return None
        return forward

    def _admitted_kernel(self, norm: Norm, dtype: torch.dtype) -> Kernel:
        if norm.kind not in (NormKind.RMS_ROUNDED_THEN_SCALED, NormKind.RMS_SCALED_THEN_ROUNDED):
            raise NotRecognized("there is no kernel for its formula")
        is_gemma = norm.gamma_offset == 1.0
        weight = Operand.of(norm.module.weight)
        rows = Operand(dtype, (FLEXIBLE, norm.width), device=weight.device)
        values = FusionValues({"x": rows, "weight": weight, "out": rows})
        self._registry.admit("flashinfer.gemma_rms_norm" if is_gemma else "flashinfer.rms_norm", values)
        library = flashinfer().norm
        return library.gemma_rmsnorm if is_gemma else library.rmsnorm


class _Forward:
    """Stands for the forward of one module."""

    def __init__(self, module: nn.Module, kernel: Kernel, norm: Norm):
        self._module = module
        self._kernel = kernel
        self._epsilon = norm.epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        if x.dtype is not weight.dtype or x.numel() == 0:
            return type(self._module).forward(self._module, x)
        rows = x.reshape(-1, x.shape[-1])
        if not rows.is_contiguous():
            rows = rows.contiguous()
        return self._kernel(rows, weight, self._epsilon).view(x.shape)


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return list(parameters) == ["weight"] and parameters["weight"].dim() == 1 and "Norm" in type(module).__name__


def _require_equal(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    """Run both on rows of very different size. This waits for the device; it happens once, before any step."""
    device, width = module.weight.device, module.weight.shape[0]
    generator = torch.Generator(device=device).manual_seed(1)
    sizes = torch.logspace(-2, 2, _ROWS, device=device)[:, None]
    x = (torch.randn(_ROWS, width, generator=generator, device=device) * sizes).to(dtype)
    with torch.no_grad():
        own, fused = type(module).forward(module, x).float(), forward(x).float()
    if not ((own - fused).abs() <= _TOLERANCE * own.abs().max()).all():
        raise NotRecognized("the kernel's results are not the module's")


def _take_away(places: Iterable[tuple[dict[str, Any], object]]) -> None:
    for attributes, forward in places:
        if attributes.get("forward") is forward:
            del attributes["forward"]

"""Gated MLPs whose activation and product are one kernel, which both projections write their results for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hfpaged.fusion.operand import FLEXIBLE, FusionValues, Operand
from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.runtime.attention.flashinfer_probe import flashinfer
from hfpaged.runtime.device.sameness import are_close, random_rows

Kernel = Callable[[torch.Tensor], torch.Tensor]

_ROWS = 8
# Name of the kernel, which is that of its fusion too -> the activation that it computes.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": functional.silu,
    "gelu_and_mul": functional.gelu,
    "gelu_tanh_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
}


class Projections(NamedTuple):
    """`inner` give gate and up, in this order: two projections, or one for both."""

    inner: tuple[nn.Linear, ...]
    down: nn.Linear


def may_be_gated_mlp(module: nn.Module) -> bool:
    """Whether a module has two or three linear layers and an activation, and nothing else that has parameters.

    A linear layer with a forward of its own may round what goes in, by less than the kernel is allowed to differ.
    """
    linears = [child for child in module.children() if type(child) is nn.Linear and "forward" not in vars(child)]
    known = {id(parameter) for linear in linears for parameter in linear.parameters()}
    return (
        len(linears) in (2, 3)
        and len(list(module.children())) == len(linears) + 1
        and all(id(parameter) in known for parameter in module.parameters())
    )


def fused_mlp(module: nn.Module, dtype: torch.dtype, registry: FusionRegistry) -> FusedMlp:
    """The module's forward for activations in `dtype`.

    Raises:
        NotRecognized, FusionRefused: it is another MLP, or there is no kernel for it.
    """
    name = _kernel_name(module)
    arrangements = list(_arrangements(module))
    if not arrangements:
        raise NotRecognized("it is not gated")
    _admit(name, arrangements[0], dtype, registry)
    kernel = getattr(flashinfer().activation, name)
    x = random_rows(_ROWS, arrangements[0].inner[0].in_features, arrangements[0].down.weight.device, dtype)
    with torch.no_grad():
        own = type(module).forward(module, x)
        for projections in arrangements:
            forward = FusedMlp(module, projections, kernel)
            if are_close(forward(x), own):
                return forward
    raise NotRecognized("the kernel's results are not the module's")


class FusedMlp:
    """Stands for the forward of one module."""

    def __init__(self, module: nn.Module, projections: Projections, kernel: Kernel):
        self._module = module
        self._projections = projections
        self._kernel = kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner, down = self._projections
        if x.dtype is not down.weight.dtype or x.numel() == 0:
            return type(self._module).forward(self._module, x)
        rows = x.reshape(-1, x.shape[-1])
        both = rows.new_empty(len(rows), sum(linear.out_features for linear in inner))
        for linear, out in zip(inner, both.split([linear.out_features for linear in inner], dim=1), strict=True):
            _project(linear, rows, out)
        return down(self._kernel(both)).view(*x.shape[:-1], down.out_features)


def _project(linear: nn.Linear, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Its output, into memory that the next kernel reads: `out` is every other half of the rows there."""
    if linear.bias is None:
        torch.mm(rows, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, rows, linear.weight.t(), out=out)


def _kernel_name(module: nn.Module) -> str:
    """By what its activation gives in fp32, where the approximations of GELU can be told apart."""
    (activation,) = (child for child in module.children() if type(child) is not nn.Linear)
    x = torch.linspace(-6, 6, 97)
    with torch.no_grad():
        own = activation(x)
    for name, function in ACTIVATIONS.items():
        if own.shape == x.shape and torch.allclose(own, function(x), rtol=0, atol=1e-6):
            return name
    raise NotRecognized(f"there is no kernel for {type(activation).__name__}")


def _arrangements(module: nn.Module) -> Iterator[Projections]:
    """Which linear layer may be which, by their shapes."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    for *inner, down in permutations(linears):
        gives = sum(linear.out_features for linear in inner)
        same = len({(linear.in_features, linear.out_features, linear.bias is None) for linear in inner}) == 1
        if same and gives == 2 * down.in_features and inner[0].in_features == down.out_features:
            yield Projections(tuple(inner), down)


def _admit(name: str, projections: Projections, dtype: torch.dtype, registry: FusionRegistry) -> None:
    inner, down = projections
    weights = {f"weight_{index}": Operand.of(linear.weight) for index, linear in enumerate((*inner, down))}
    device = weights["weight_0"].device
    operands = {
        "x": Operand(dtype, (FLEXIBLE, 2 * down.in_features), device=device),
        "out": Operand(dtype, (FLEXIBLE, down.in_features), device=device),
        **weights,
    }
    registry.admit(f"flashinfer.{name}", FusionValues(operands))

"""Finds out how a normalization module computes: by running it on random numbers with random weights of its own.

The module's present weights would not do: with a weight of ones, all rounding conventions agree.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from hfpaged.program.abi import NormKind
from hfpaged.program.description import Norm, NotRecognized

_ROWS = 16
_MAX_MISMATCHES = 0.02  # of the elements: a rounding tie may fall either way where sums are taken in another order


def identify_norm(module: nn.Module, width: int, dtype: torch.dtype) -> Norm:
    """The convention of a module that normalizes the last dimension of [..., width] activations in `dtype`.

    Raises:
        NotRecognized: its results are none of the known formulas.
    """
    epsilon = _epsilon(module, dtype)
    parameters = {name: value for name, value in module.named_parameters(recurse=False)}
    if not set(parameters) <= {"weight", "bias"} or any(value.shape != (width,) for value in parameters.values()):
        raise NotRecognized(f"{type(module).__name__} has parameters that a norm over {width} elements has not")
    generator = torch.Generator().manual_seed(1)
    twin = _twin_with_random_weights(module, parameters, generator)
    # Rows of very different size: epsilon matters in the small ones.
    sizes = torch.logspace(-3, 2, _ROWS)[:, None]
    x = (torch.randn(_ROWS, width, generator=generator) * sizes + 0.1 * sizes).to(dtype)
    expected = type(module).forward(twin, x)
    if expected.dtype != dtype or expected.shape != x.shape:
        raise NotRecognized(f"{type(module).__name__} changes the dtype or shape of its input")
    for kind, offset in _candidates(twin):
        norm = Norm(module, kind, width, epsilon, offset)
        if _mismatches(reference_norm(norm, twin, x), expected) <= _MAX_MISMATCHES:
            return norm
    raise NotRecognized(f"{type(module).__name__} follows no known normalization formula")


def gamma_of(norm: Norm, module: nn.Module | None = None) -> torch.Tensor:
    """fp32 [width] factor of the norm, from the present weight of its module (or of `module` in its place)."""
    weight = getattr(module or norm.module, "weight", None)
    if weight is None:
        return torch.ones(norm.width)
    return weight.detach().float() + norm.gamma_offset


def beta_of(norm: Norm, module: nn.Module | None = None) -> torch.Tensor | None:
    """fp32 [width] summand of the norm, if its module has one."""
    bias = getattr(module or norm.module, "bias", None)
    return None if bias is None else bias.detach().float()


def reference_norm(norm: Norm, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The formula of `norm` with the weights of `module`, in torch. x: [..., width]."""
    gamma, wide = gamma_of(norm, module), x.float()
    if norm.kind == NormKind.LAYER_NORM:
        return functional.layer_norm(wide, (norm.width,), gamma, beta_of(norm, module), norm.epsilon).to(x.dtype)
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    if norm.kind == NormKind.RMS_ROUNDED_THEN_SCALED:
        unit = unit.to(x.dtype).float()
    return (unit * gamma).to(x.dtype)


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    for name in ("variance_epsilon", "eps", "epsilon"):
        if hasattr(module, name):
            value = getattr(module, name)
            return float(torch.finfo(dtype).eps if value is None else value)
    raise NotRecognized(f"{type(module).__name__} has no epsilon, so it is no norm that is known")


def _twin_with_random_weights(
    module: nn.Module, parameters: dict[str, torch.Tensor], generator: torch.Generator
) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = dict(module._parameters) | {
        name: (1 + 0.5 * torch.randn(value.shape, generator=generator)).to(value.dtype)
        for name, value in parameters.items()
    }
    return twin


def _candidates(module: nn.Module) -> list[tuple[NormKind, float]]:
    if getattr(module, "bias", None) is not None:
        return [(NormKind.LAYER_NORM, 0.0)]
    return [
        (NormKind.RMS_ROUNDED_THEN_SCALED, 0.0),
        (NormKind.RMS_SCALED_THEN_ROUNDED, 0.0),
        (NormKind.RMS_SCALED_THEN_ROUNDED, 1.0),
        (NormKind.LAYER_NORM, 0.0),
    ]


def _mismatches(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Fraction of elements that differ by more than the order of an fp32 sum explains."""
    tolerance = 2e-5 if expected.dtype == torch.float32 else 0.0
    wrong = (got.float() - expected.float()).abs() > tolerance * expected.float().abs().clamp_min(1e-6)
    return wrong.float().mean().item()

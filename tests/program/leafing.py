"""Leaves without an engine: the modules of a view with native forwards, in tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hfpaged.fusion.registry import FusionRegistry
from hfpaged.runtime.leaves.admission import LeafGate
from hfpaged.runtime.leaves.kernels import LeafKernels
from hfpaged.runtime.leaves.leaf import Leaf
from hfpaged.runtime.placing import Forward


def gate() -> LeafGate:
    """A gate that has refused nothing yet."""
    return LeafGate(FusionRegistry())


def kernels(threads: int = 1) -> LeafKernels:
    """The native library, to be used with that many threads."""
    found = LeafKernels()
    found.threads = threads
    return found


def forward_of(leaf: Leaf, native: LeafKernels, name: str = "it") -> Forward:
    """A forward of a leaf, over the present weights."""
    native.refresh()
    return leaf.forwards()[name]


def random_module(make: Callable[[], nn.Module], dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A module whose parameters are all random, vectors about 1."""
    module = make().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5)
    return module.requires_grad_(False)


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """[rows, width] of normal random numbers."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)

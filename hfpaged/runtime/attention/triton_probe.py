"""Whether Triton's kernels can be used here, and for what."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache

import torch

from hfpaged.runtime.attention.interface import LayerShape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEAD_DIM = 256
# Of NVIDIA's cards: those that Triton compiles for, and those that have products of bfloat16.
OLDEST_CAPABILITY, OLDEST_WITH_BFLOAT16 = (7, 5), (8, 0)


def machine_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run on `device`, in one line; None: nothing is known that speaks against it."""
    if device.type not in ("cuda", "xpu"):
        return f"the Triton kernels run on GPUs of NVIDIA, AMD and Intel, not on {device}"
    if not torch.get_device_module(device).is_available():
        return "PyTorch finds no usable GPU"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        oldest = OLDEST_WITH_BFLOAT16 if dtype is torch.bfloat16 else OLDEST_CAPABILITY
        if capability < oldest:
            return f"Triton needs compute capability {oldest[0]}.{oldest[1]} for {_name(dtype)}, not {capability}"
    return package_problem()


@lru_cache(maxsize=1)
def package_problem() -> str | None:
    """Why the package cannot be imported, in one line."""
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch's builds for GPUs on Linux, is not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:  # whatever goes wrong in a driver's library must not reach the user as a stack trace
        return f"Triton cannot be imported ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None


def model_problem(dtype: torch.dtype, shapes: Sequence[LayerShape]) -> str | None:
    """Why the kernels cannot serve such a model, in one line."""
    if dtype not in DTYPES:
        return f"the Triton kernels compute in {', '.join(map(_name, DTYPES))}, not in {_name(dtype)}"
    largest = max((max(shape.key_dim, shape.value_dim) for shape in shapes), default=0)
    if largest > MOST_HEAD_DIM:
        return f"the Triton kernels go up to head dimension {MOST_HEAD_DIM}, not {largest}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

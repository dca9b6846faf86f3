"""Whether FlashInfer can be used here, and for what. That it can be imported says little: it can without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from hfpaged.errors import MissingDependencyError
from hfpaged.runtime.attention.interface import LayerShape

DTYPES = (torch.bfloat16, torch.float16)
# It takes any head dimension and computes nonsense, or worse, for those that no kernel was made for.
HEAD_DIMS = (64, 128, 256)
UNEQUAL_HEAD_DIMS = ((192, 128),)
OLDEST_CAPABILITY = (8, 0)
INSTALL = 'pip install "hfpaged[cuda]"'


def machine_problem(device: torch.device) -> str | None:
    """Why FlashInfer cannot run on `device`, in one line; None: it can."""
    if device.type != "cuda":
        return f"FlashInfer runs on NVIDIA GPUs, not on {device}"
    if torch.version.hip is not None:
        return "FlashInfer runs on NVIDIA GPUs, and this PyTorch is built for AMD's"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable CUDA device"
    capability = compute_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"FlashInfer needs compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}, not {capability}"
    return package_problem() or compiler_problem()


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def package_problem() -> str | None:
    """Why the package cannot be imported, in one line."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"FlashInfer is not installed: {INSTALL}"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # whatever one of its many dependencies does must not reach the user as a stack trace
        first_line = next(iter(str(error).splitlines()), "")
        return f"FlashInfer cannot be imported ({type(error).__name__}: {first_line})"
    return None


def compiler_problem() -> str | None:
    """Why kernels that are not there cannot be compiled: it ships none, and compiles each at its first use."""
    if has_compiled_kernels():
        return None
    if find_nvcc() is None:
        return "FlashInfer compiles its kernels with nvcc, which is not here: install the CUDA toolkit or set CUDA_HOME"
    for tool, remedy in (("ninja", "activate the environment"), (os.environ.get("CXX", "c++"), "install a compiler")):
        if shutil.which(tool) is None:
            return f"FlashInfer compiles its kernels with {tool}, which is not on PATH: {remedy}"
    return None


def has_compiled_kernels() -> bool:
    """Whether kernels that were compiled elsewhere are installed beside the package."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = importlib.util.find_spec("flashinfer")
    places = spec.submodule_search_locations or () if spec is not None else ()
    return any(any(Path(place, "data", "aot").glob("*/*.so")) for place in places)


def find_nvcc() -> str | None:
    """The compiler, where FlashInfer looks for it."""
    named = os.environ.get("FLASHINFER_NVCC")
    if named:
        return shutil.which(named)
    homes = [home for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    found = [shutil.which(str(Path(home, "bin", "nvcc"))) for home in homes]
    return next(filter(None, [*found, shutil.which("nvcc"), shutil.which("/usr/local/cuda/bin/nvcc")]), None)


def model_problem(dtype: torch.dtype, shapes: Sequence[LayerShape]) -> str | None:
    """Why FlashInfer cannot serve such a model, in one line."""
    if dtype not in DTYPES:
        return f"FlashInfer computes in {_names(DTYPES)}, not in {_names([dtype])}"
    largest = max((max(shape.key_dim, shape.value_dim) for shape in shapes), default=0)
    if largest > HEAD_DIMS[-1]:
        return f"FlashInfer's kernels go up to head dimension {HEAD_DIMS[-1]}, not {largest}"
    return None


def kernel_dims(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The head dimensions of the kernel for a layer: as they are where there is one, else the next for both."""
    if (key_dim, value_dim) in UNEQUAL_HEAD_DIMS:
        return key_dim, value_dim
    dim = next(dim for dim in HEAD_DIMS if dim >= max(key_dim, value_dim))
    return dim, dim


def flashinfer() -> ModuleType:
    """The package.

    Raises:
        MissingDependencyError: it is not there; the message says what to install.
    """
    problem = package_problem()
    if problem is not None:
        raise MissingDependencyError(problem)
    return importlib.import_module("flashinfer")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

"""Print what hfpaged finds on this machine: versions, CPU kernels, threads, memory, GPU."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import hfpaged
from hfpaged.native import library
from hfpaged.runtime.attention import flashinfer_probe, triton_probe

NAME = "env"
SUMMARY = "print versions, CPU kernels, threads, memory and GPU"

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "gguf", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`env` takes none."""


def run(args: argparse.Namespace) -> int:
    """Returns 0; what is missing is part of the answer."""
    rows = [("hfpaged", hfpaged.__version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, package_version(name) or "not installed") for name in PACKAGES]
    rows += [("cpu", cpu_name()), ("kernels", kernels()), ("threads", threads()), ("memory", memory()), ("gpu", gpu())]
    rows += [("flashinfer", flashinfer()), ("triton", triton())]
    for name, value in rows:
        print(f"{name:<14}{value}")
    return 0


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernels() -> str:
    """Whether the compiled CPU kernels run here, for which instruction set, and what to do if not."""
    problem = library.unavailable()
    return f"on, {library.isa()}" if problem is None else f"off: {problem}"


def flashinfer() -> str:
    """Whether FlashInfer can be used on the first CUDA device, and what to do if not."""
    problem = flashinfer_probe.machine_problem(torch.device("cuda"))
    return f"on, {package_version('flashinfer-python')}" if problem is None else f"off: {problem}"


def triton() -> str:
    """Whether the Triton kernels can be used on the first GPU, and why not."""
    problem = triton_probe.machine_problem(torch.device("cuda"), torch.float16)
    return f"on, {package_version('triton')}" if problem is None else f"off: {problem}"


def threads() -> str:
    """Torch's thread count beside the cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count()
    return f"{torch.get_num_threads()} of {cores} cores"


def cpu_name() -> str:
    """The CPU's name from /proc/cpuinfo; elsewhere what the platform module knows."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    """Free and total memory from /proc/meminfo."""
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in _lines("/proc/meminfo"))}
    if "MemAvailable" not in kib:
        return "unknown"
    return f"{kib['MemAvailable'] / 2**20:.1f} GiB free of {kib['MemTotal'] / 2**20:.1f}"


def gpu() -> str:
    """The first CUDA device torch sees, or why there is none."""
    if not torch.cuda.is_available():
        return "none" if torch.version.cuda else "none (this torch is built without CUDA)"
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return f"{name}, {free / 2**30:.1f} GiB free of {total / 2**30:.1f}, CUDA {torch.version.cuda}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

"""The kernel library, built if it is missing, and its instruction set variants."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from quiet import torch_threads

from hfpaged.native import build, library


@pytest.fixture(scope="session", autouse=True)
def kernels() -> ctypes.CDLL:
    """The loaded library. Without a compiler these tests cannot run."""
    if not build.LIBRARY.exists():
        try:
            build.compile_library()
        except build.KernelBuildError as error:
            pytest.skip(str(error))
    return library.load()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests that want more threads ask for them."""
    with torch_threads(1):
        yield


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> Iterator[str]:
    """Each variant that this CPU runs, in turn."""
    wanted = library.ISAS.index(request.param)
    used = kernels.hfp_use_isa(wanted)
    if used == wanted:
        yield request.param
    kernels.hfp_use_isa(len(library.ISAS) - 1)
    if used != wanted:
        pytest.skip(f"this CPU has no {request.param}")

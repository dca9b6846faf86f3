"""The kernel library, and its instruction set variants."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from quiet import torch_threads

from hfpaged.native import library


@pytest.fixture(scope="session", autouse=True)
def kernels() -> ctypes.CDLL:
    """The loaded library; tests of programs need it."""
    reason = library.unavailable()
    if reason:
        pytest.skip(reason)
    return library.load()


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny models in torch are slower on two threads; the programs have threads of their own."""
    with torch_threads(1):
        yield


@pytest.fixture(params=library.ISAS)
def isa(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    before = library.ISAS.index(library.isa())
    if kernels.hfp_use_isa(library.ISAS.index(request.param)) != library.ISAS.index(request.param):
        kernels.hfp_use_isa(before)
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels.hfp_use_isa(before)

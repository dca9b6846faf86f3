"""Which attention backend an engine gets, and why not another one."""

from __future__ import annotations

import pytest
import torch

from hfpaged.errors import ConfigError
from hfpaged.native import library
from hfpaged.runtime.attention.interface import LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend
from hfpaged.runtime.attention.select import choose_backend
from hfpaged.runtime.attention.torch_backend import TorchBackend

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 64, 64), LayerShape(1, 192, 128)]


@pytest.fixture
def kernels(monkeypatch):
    """The answer of the kernel library, whatever this machine has."""

    def set_reason(reason):
        monkeypatch.setattr(library, "unavailable", lambda: reason)

    set_reason(None)
    return set_reason


@pytest.mark.skipif(library.unavailable() is not None, reason="the kernels are not built")
def test_auto_prefers_native():
    choice = choose_backend("auto", CPU, torch.bfloat16, SHAPES, 16)
    assert isinstance(choice.backend, NativeBackend)
    assert choice.rejected == {}


def test_auto_falls_back_with_the_reason(kernels):
    kernels("the CPU kernels are not built")
    backend, rejected = choose_backend("auto", CPU, torch.bfloat16, SHAPES, 16)
    assert isinstance(backend, TorchBackend)
    assert rejected == {"native": "the CPU kernels are not built"}


def test_named_backend_must_be_available(kernels):
    kernels("the CPU kernels are not built")
    with pytest.raises(ConfigError, match="native: the CPU kernels are not built"):
        choose_backend("native", CPU, torch.bfloat16, SHAPES, 16)


def test_named_backend_is_taken():
    choice = choose_backend("torch", CPU, torch.bfloat16, SHAPES, 16)
    assert isinstance(choice.backend, TorchBackend)
    assert choice.rejected == {}


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="auto, flashinfer, triton, native, torch"):
        choose_backend("flash", CPU, torch.bfloat16, SHAPES, 16)


@pytest.mark.parametrize(
    ("device", "dtype", "shapes", "block_size", "reason"),
    [
        ("cuda", torch.bfloat16, SHAPES, 16, "on cuda"),
        ("cpu", torch.float64, SHAPES, 16, "float64"),
        ("cpu", torch.float32, SHAPES, 8, "multiple of 16"),
        ("cpu", torch.float32, [*SHAPES, LayerShape(1, 33, 32)], 16, "33"),
        ("cpu", torch.float32, [LayerShape(1, 64, 576)], 16, "576"),
    ],
)
def test_native_says_what_it_cannot_do(kernels, device, dtype, shapes, block_size, reason):
    assert reason in NativeBackend.unavailable(torch.device(device), dtype, shapes, block_size)


def test_torch_refuses_integers():
    assert "int8" in TorchBackend.unavailable(CPU, torch.int8, SHAPES, 16)

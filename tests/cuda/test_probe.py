"""Whether FlashInfer is used, and why not: one line, the next best backend, and never a stack trace."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from engine.hooks import with_import_paths
from families import build_tiny

import hfpaged
from hfpaged.errors import ConfigError, MissingDependencyError
from hfpaged.runtime.attention import flashinfer_backend, triton_backend, triton_probe
from hfpaged.runtime.attention import flashinfer_probe as probe
from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import LayerShape
from hfpaged.runtime.attention.select import choose_backend, find_backend

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPES = [LayerShape(2, 64, 64)]


@pytest.fixture
def gpu(monkeypatch):
    """A machine on which all is well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(probe, "package_problem", lambda: None)
    monkeypatch.setattr(probe, "has_compiled_kernels", lambda: False)
    monkeypatch.setattr(probe, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    monkeypatch.setattr(flashinfer_backend, "trial_problem", lambda *_: None)
    return monkeypatch


def test_all_is_well(gpu):
    assert FlashInferBackend.unavailable(CUDA, torch.bfloat16, SHAPES, 16) is None


@pytest.mark.parametrize(
    ("module", "name", "answer", "reason"),
    [
        (torch.cuda, "is_available", False, "no usable CUDA device"),
        (torch.cuda, "get_device_capability", (7, 5), "needs compute capability 8.0"),
        (torch.version, "hip", "6.4", "AMD"),
        (probe, "package_problem", "FlashInfer is not installed", "not installed"),
        (probe, "find_nvcc", None, "nvcc"),
    ],
)
def test_what_is_wrong_with_the_machine(gpu, module, name, answer, reason):
    gpu.setattr(module, name, answer if name == "hip" else lambda *args: answer)
    found = FlashInferBackend.unavailable(CUDA, torch.bfloat16, SHAPES, 16)
    assert reason in found
    assert "\n" not in found


def test_kernels_compiled_elsewhere_need_no_compiler(gpu):
    gpu.setattr(probe, "find_nvcc", lambda: None)
    gpu.setattr(probe, "has_compiled_kernels", lambda: True)
    assert probe.machine_problem(CUDA) is None


def test_what_is_wrong_with_the_model(gpu):
    assert "not in float32" in FlashInferBackend.unavailable(CUDA, torch.float32, SHAPES, 16)
    assert "not 576" in FlashInferBackend.unavailable(CUDA, torch.bfloat16, [LayerShape(1, 576, 512)], 16)


def test_the_next_best_backend_is_taken_and_the_reason_kept(gpu):
    gpu.setattr(probe, "find_nvcc", lambda: None)
    gpu.setattr(triton_backend, "machine_problem", lambda *_: None)
    gpu.setattr(triton_backend, "trial_problem", lambda *_: None)
    found, rejected = find_backend("auto", CUDA, torch.bfloat16, SHAPES, 16)
    assert found.name == "triton"
    assert list(rejected) == ["flashinfer"]
    assert "nvcc" in rejected["flashinfer"]


def test_without_triton_as_well_torch_is_left(gpu):
    gpu.setattr(probe, "find_nvcc", lambda: None)
    gpu.setattr(triton_probe, "package_problem", lambda: "Triton is not installed")
    choice = choose_backend("auto", CUDA, torch.bfloat16, SHAPES, 16)
    assert choice.backend.name == "torch"
    assert choice.rejected["triton"] == "Triton is not installed"


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "reason"),
    [
        (torch.bfloat16, 64, (7, 5), "8.0 for bfloat16"),
        (torch.float16, 64, (7, 0), "7.5 for float16"),
        (torch.float64, 64, (9, 0), "not in float64"),
        (torch.float16, 512, (9, 0), "not 512"),
    ],
)
def test_what_the_triton_kernels_cannot_do(gpu, dtype, dim, capability, reason):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu.setattr(triton_probe, "package_problem", lambda: None)
    gpu.setattr(triton_backend, "trial_problem", lambda *_: None)
    shapes = [LayerShape(1, dim, dim)]
    assert reason in triton_backend.TritonBackend.unavailable(CUDA, dtype, shapes, 16)
    assert triton_backend.TritonBackend.unavailable(CUDA, torch.float16, SHAPES, 16) is None or capability == (7, 0)


def test_asked_for_by_name_on_a_cpu():
    with pytest.raises(ConfigError, match="flashinfer: FlashInfer runs on NVIDIA GPUs, not on cpu"):
        choose_backend("flashinfer", CPU, torch.bfloat16, SHAPES, 16)


def test_a_package_that_does_not_import_is_a_reason_and_no_stack_trace(monkeypatch):
    def broken(name):
        raise RuntimeError("libcudart.so.13 is not here\nand a stack trace")

    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probe.importlib, "import_module", broken)
    probe.package_problem.cache_clear()
    try:
        assert probe.package_problem() == "FlashInfer cannot be imported (RuntimeError: libcudart.so.13 is not here)"
        with pytest.raises(MissingDependencyError, match="libcudart"):
            probe.flashinfer()
    finally:
        probe.package_problem.cache_clear()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    probe.package_problem.cache_clear()
    try:
        assert 'pip install "hfpaged[cuda]"' in probe.package_problem()
    finally:
        probe.package_problem.cache_clear()


def test_nvcc_is_looked_for_where_flashinfer_looks(monkeypatch, tmp_path):
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert probe.find_nvcc() == str(nvcc)
    monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "absent"))
    assert probe.find_nvcc() is None


def test_importing_and_patching_imports_neither_flashinfer_nor_the_triton_kernels():
    code = (
        "import sys, hfpaged\nfrom families import build_tiny\nmodel = build_tiny('llama')\nmodel.patch()\n"
        "assert not any(name.split('.')[0] == 'flashinfer' or 'triton_kernels' in name for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=with_import_paths(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_stand_in_is_chosen_on_its_machine_only(cuda):
    model = build_tiny("llama")
    model.patch()
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape[1] <= 6
    assert hfpaged.engine(model).stats()["backend"] == "flashinfer"
    model.unpatch()

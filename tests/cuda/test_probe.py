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
from hfpaged.runtime.attention import flashinfer_backend, trial, triton_backend, triton_probe
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
    monkeypatch.setattr(probe.shutil, "which", lambda tool: f"/usr/bin/{tool}")
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


@pytest.mark.parametrize("tool", ["ninja", "c++", "my-compiler"])
def test_what_else_compiling_needs(gpu, tool):
    if tool == "my-compiler":
        gpu.setenv("CXX", tool)
    gpu.setattr(probe.shutil, "which", lambda name: None if name == tool else f"/usr/bin/{name}")
    assert f"with {tool}, which is not on PATH" in probe.machine_problem(CUDA)


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


def test_on_intels_cards_triton_is_tried_out(monkeypatch):
    device, tried = torch.device("xpu"), []
    monkeypatch.setattr(triton_backend, "trial_problem", lambda *args: tried.append(args))
    monkeypatch.setattr(triton_probe, "package_problem", lambda: None)
    found, rejected = find_backend("auto", device, torch.bfloat16, SHAPES, 16)
    assert (found.name, rejected) == ("torch", {"triton": "PyTorch finds no usable GPU"})
    assert not tried
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    found, rejected = find_backend("auto", device, torch.bfloat16, SHAPES, 16)
    assert (found.name, rejected) == ("triton", {})
    assert tried
    monkeypatch.setattr(triton_backend, "trial_problem", lambda *_: "its kernels do not run here")
    found, rejected = find_backend("auto", device, torch.bfloat16, SHAPES, 16)
    assert (found.name, rejected) == ("torch", {"triton": "its kernels do not run here"})


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (r"raise OSError('libcuda.so.1: cannot open shared object\nand more')", "OSError: libcuda.so.1: cannot open"),
        pytest.param("import tvm_ffi_that_is_not_there", "ModuleNotFoundError: No module", marks=pytest.mark.slow),
    ],
    ids=["a missing driver", "a missing package"],
)
def test_a_package_that_breaks_on_a_machine_with_a_gpu(tmp_path, content, reason):
    """Nothing else is patched: the command prints its line, and a model goes on without."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text(content)
    code = (
        "import torch, hfpaged\nfrom hfpaged.cli.main import main\nfrom families import build_tiny\n"
        "torch.cuda.is_available = lambda: True\ntorch.cuda.get_device_capability = lambda *_: (9, 0)\n"
        "torch.cuda.mem_get_info = lambda *_: (1, 1)\ntorch.cuda.get_device_name = lambda *_: 'a card'\n"
        "assert main(['env']) == 0\n"
        "model = build_tiny('llama')\nmodel.patch()\nmodel.generate(torch.tensor([[5, 6]]), max_new_tokens=2)"
    )
    paths = with_import_paths()
    paths["PYTHONPATH"] = f"{tmp_path}:{paths['PYTHONPATH']}"
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("flashinfer")]
    assert f"off: FlashInfer cannot be imported ({reason}" in line
    assert "and more" not in line


def test_kernels_that_do_not_compile_or_are_wrong_cost_the_backend_and_nothing_else(cuda, monkeypatch):
    def stopped(*args, **kwargs):
        raise RuntimeError("ninja: build stopped: subcommand failed\nnvcc fatal: unsupported gpu architecture")

    monkeypatch.setattr(cuda.library.BatchPrefillWithPagedKVCacheWrapper, "plan", stopped)
    monkeypatch.setattr(trial, "_try", trial._try.__wrapped__)
    model = build_tiny("llama")
    with hfpaged.patched(model):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
        counted = hfpaged.engine(model).stats()
    assert counted["backend"] == "torch"
    assert "ninja: build stopped: subcommand failed" in counted["backend_reasons"]["flashinfer"]
    assert "fatal" not in counted["backend_reasons"]["flashinfer"]


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

"""Loading the kernel library, and what is said when it cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hfpaged.errors import NativeKernelError
from hfpaged.native import build, library, self_test


def test_missing_library_names_the_command_that_builds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_LIBRARY", tmp_path / "_kernels.so")
    with pytest.raises(NativeKernelError, match=r"not built.*python -m hfpaged\.native\.build"):
        library._Loader().load()


def test_broken_library_is_refused(monkeypatch, tmp_path):
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_LIBRARY", broken)
    loader = library._Loader()
    for _ in range(2):
        with pytest.raises(NativeKernelError, match="do not load"):
            loader.load()


def test_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    with pytest.raises(NativeKernelError, match="version"):
        library._Loader().load()


def test_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(NativeKernelError, match="sse9"):
        library._Loader().load()


def test_failure_becomes_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_LIBRARY", tmp_path / "_kernels.so")
    monkeypatch.setattr(library, "_LOADER", library._Loader())
    reason = library.unavailable()
    assert reason is not None and "\n" not in reason


def test_threads_share_one_library():
    loader = library._Loader()
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: loader.load(), range(32)))
    assert all(one is loaded[0] for one in loaded)


def test_variable_selects_the_instruction_set():
    code = "from hfpaged.native import library; print(library.isa())"
    environment = {**os.environ, library.ISA_VARIABLE: "plain"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plain"]


def test_self_test_passes(kernels, isa):
    assert self_test.failure(kernels) is None


def test_self_test_notices_wrong_results(kernels, monkeypatch):
    monkeypatch.setattr(self_test, "_expected", lambda *_: [0.5] * self_test.DIM)
    assert "off by" in self_test.failure(kernels)


def test_header_and_loader_agree_on_the_version():
    header = (build.SOURCES / "abi.h").read_text()
    assert f"#define HFP_ABI_VERSION {library.ABI_VERSION}\n" in header

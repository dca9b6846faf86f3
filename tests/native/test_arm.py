"""The kernels on ARM, cross-compiled and run under qemu: the same bits as the plain variant here."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hfpaged.native import build

pytestmark = pytest.mark.slow

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
RESULTS = Path(__file__).with_name("kernel_results.cpp")


def results(compiler: str, folder: Path, emulator: tuple[str, ...] = ()) -> list[str]:
    """Compile the kernels and the program that calls them for one machine, and run it."""
    build.compile_library(folder / "libkernels.so", folder / "objects")
    program = folder / "results"
    subprocess.run(
        [compiler, "-std=c++17", "-I", str(build.SOURCES), "-fopenmp", str(RESULTS), "-o", str(program),
         *map(str, (folder / "objects").glob("*.o")), *(["-static"] if emulator else [])],
        check=True,
    )  # fmt: skip
    answer = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True)
    return answer.stdout.splitlines()


def test_arm_computes_the_same_bits(tmp_path, monkeypatch):
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    here = results(build.find_compiler()[0], tmp_path / "here")
    monkeypatch.setenv("CXX", COMPILER)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    arm = results(COMPILER, tmp_path / "arm", (EMULATOR,))
    assert len(here) == 21
    assert all(" status 0 " in line for line in here)
    assert arm == here

"""Building the kernel library: what is compiled, when, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess

import pytest

from hfpaged.native import build

needs_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="variants exist on x86 only")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A small csrc/: one baseline source, one per instruction set, one header that only the latter includes."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "base.cpp").write_text('extern "C" __attribute__((visibility("default"))) int base() { return 7; }\n')
    (folder / "answer.isa.cpp").write_text(
        '#include "answer.h"\nnamespace HFP_ISA { int answer() { return kAnswer; } }\n'
    )
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def compile_here(tmp_path):
    return lambda force=False: build.compile_library(tmp_path / "lib" / "k.so", tmp_path / "objects", force)


def age(folder):
    """Make every file under `folder` an hour old."""
    for path in folder.rglob("*"):
        stat = path.stat()
        os.utime(path, (stat.st_atime - 3600, stat.st_mtime - 3600))


def test_builds_a_library_that_loads(sources, compile_here, tmp_path):
    assert compile_here()
    assert ctypes.CDLL(str(tmp_path / "lib" / "k.so")).base() == 7


def test_second_build_does_nothing(sources, compile_here):
    compile_here()
    assert not compile_here()
    assert compile_here(force=True)


def test_header_change_rebuilds_only_its_users(sources, compile_here, tmp_path):
    compile_here()
    objects = tmp_path / "objects"
    before = {path.name: path.stat().st_mtime_ns for path in objects.glob("*.o")}
    os.utime(sources / "answer.h", ns=(2 * max(before.values()),) * 2)
    assert compile_here()
    changed = {name for name, time in before.items() if (objects / name).stat().st_mtime_ns != time}
    assert changed == {name for name in before if name.startswith("answer.")}


@needs_x86
def test_isa_sources_are_compiled_once_per_instruction_set(sources, tmp_path):
    targets = {job.target.name: job.flags for job in build.plan_jobs(tmp_path)}
    assert set(targets) == {"base.o", *(f"answer.{isa}.o" for isa in ("plain", "avx2", "avx512", "avx512bf16"))}
    assert "-mavx512bf16" in targets["answer.avx512bf16.o"]
    assert not any(flag.startswith("-m") for flag in targets["answer.plain.o"] + targets["base.o"])


def test_compile_error_carries_the_compilers_message(sources, compile_here):
    (sources / "base.cpp").write_text("int broken( {\n")
    with pytest.raises(build.KernelBuildError, match=r"base\.cpp:1"):
        compile_here()


def test_no_compiler(sources, compile_here, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.KernelBuildError, match=r"g\+\+ or clang\+\+"):
        compile_here()


def test_named_compiler_is_used(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(build.KernelBuildError, match="no-such-compiler"):
        build.find_compiler()


@pytest.fixture
def install_command(tmp_path):
    setuptools = pytest.importorskip("setuptools")
    extension = setuptools.Extension("hfpaged.native._kernels", [])
    command = build.BuildKernels(setuptools.Distribution({"name": "hfpaged", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    return command


def test_install_puts_the_library_into_the_package(sources, install_command, tmp_path):
    install_command.run()
    assert ctypes.CDLL(str(tmp_path / "lib" / "hfpaged" / "native" / "_kernels.so")).base() == 7


def test_install_without_compiler_warns_and_goes_on(sources, install_command, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="without its CPU kernels"):
        install_command.run()
    assert not list(tmp_path.rglob("*.so"))


@needs_x86
@pytest.mark.skipif(not shutil.which("nm"), reason="needs binutils")
def test_no_variant_shares_code_with_another():
    # The linker keeps one copy of a weak symbol: outside the variant's namespace it may be the one for AVX-512, which
    # another CPU would then run.
    objects = [path for isa in build.VARIANTS for path in build.OBJECTS.glob(f"*.{isa}.o")]
    if not objects:
        pytest.skip("the library was not built in place")
    for path in objects:
        isa = path.name.split(".")[1]
        symbols = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        weak = [line for line in symbols.splitlines() if line[17:18] in ("W", "V", "u")]
        assert [line for line in weak if f"hfp::{isa}::" not in line] == [], path.name

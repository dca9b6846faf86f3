"""Compiles csrc/ into the shared library `_kernels.so` next to this file.

For developers: ``python -m hfpaged.native.build`` (``--force`` recompiles everything). For installs: setuptools calls
`BuildKernels` as its ``build_ext`` command. setuptools loads this file alone, before the package can be imported, so it
uses the standard library only.

A source named ``*.isa.cpp`` is compiled once per instruction set of `VARIANTS`, in a namespace of that name (macro
HFP_ISA); the library picks one when it is loaded. Every other source is compiled for the baseline of the platform.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

try:
    from setuptools.command.build_ext import build_ext
except ImportError:  # python -m hfpaged.native.build needs no setuptools
    build_ext = object

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = Path(__file__).with_name("_kernels.so")
OBJECTS = Path(__file__).with_name("_objects")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),  # every CPU that has the one has the other
}

# Contraction would let the compiler fuse a multiply-add in one instantiation of a kernel and not in another; results
# must not depend on which one ran.
_COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-MMD")


class KernelBuildError(RuntimeError):
    """No usable C++ compiler, or the compiler refused a source. The message carries the compiler's own."""


class CompileJob(NamedTuple):
    """One source compiled for one instruction set."""

    source: Path
    target: Path
    flags: tuple[str, ...]

    def is_stale(self) -> bool:
        """Whether the object is missing or older than this file, its source or a header it includes."""
        if not self.target.exists():
            return True
        built = self.target.stat().st_mtime
        inputs = [Path(__file__), self.source, *_included(self.target.with_suffix(".d"))]
        return any(not path.exists() or path.stat().st_mtime > built for path in inputs)


def compile_library(library: Path = LIBRARY, objects: Path = OBJECTS, force: bool = False) -> bool:
    """Bring `library` up to date with csrc/.

    Args:
        library: path of the shared library to write.
        objects: folder for object files, kept so that the next build recompiles only what changed.
        force: recompile everything.

    Returns:
        Whether anything had to be built.

    Raises:
        KernelBuildError: no compiler, or a compile or link error.
    """
    compiler = find_compiler()
    _prepare(objects)
    jobs = plan_jobs(objects)
    stale = [job for job in jobs if force or job.is_stale()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda job: _compile(compiler, job), stale):
            pass
    newest = max(job.target.stat().st_mtime for job in jobs)
    if not stale and library.exists() and library.stat().st_mtime >= newest:
        return False
    _link(compiler, [job.target for job in jobs], library)
    return True


def find_compiler() -> list[str]:
    """Command of the C++ compiler: $CXX, else g++, else clang++.

    Raises:
        KernelBuildError: none is installed.
    """
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    names = " or ".join(command[0] for command in candidates)
    raise KernelBuildError(f"no C++ compiler found: install {names}, or set CXX")


def plan_jobs(objects: Path) -> list[CompileJob]:
    """Every (source, instruction set) to compile on this platform, the largest sources first."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    variants = VARIANTS if x86 else {"plain": ()}
    common = (*_COMPILE_FLAGS, *_openmp_flags(), *(("-DHFP_X86",) if x86 else ()))
    jobs = []
    for source in sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size):
        if source.name.endswith(".isa.cpp"):
            stem = source.name.removesuffix(".isa.cpp")
            for name, flags in variants.items():
                jobs.append(CompileJob(source, objects / f"{stem}.{name}.o", (*common, *flags, f"-DHFP_ISA={name}")))
        else:
            jobs.append(CompileJob(source, objects / f"{source.stem}.o", common))
    return jobs


def _openmp_flags() -> tuple[str, ...]:
    # Apple's clang has no OpenMP; the kernels then run on one thread.
    return () if sys.platform == "darwin" else ("-fopenmp",)


def _prepare(objects: Path) -> None:
    objects.mkdir(parents=True, exist_ok=True)
    ignore = objects / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")


def _included(dependencies: Path) -> list[Path]:
    """Files that the compiler read for an object, from the make rule it wrote (-MMD)."""
    if not dependencies.exists():
        return []
    _, _, names = dependencies.read_text().replace("\\\n", " ").partition(": ")
    return [Path(name) for name in names.split()]


def _compile(compiler: list[str], job: CompileJob) -> None:
    # Written under another name first: an interrupted or concurrent build never leaves a half-written object.
    partial = job.target.with_suffix(f".{os.getpid()}.o")
    rule = str(job.target.with_suffix(".d"))
    _call([*compiler, *job.flags, "-MF", rule, "-c", str(job.source), "-o", str(partial)])
    os.replace(partial, job.target)


def _link(compiler: list[str], objects: list[Path], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}.so")
    symbolic = ("-Wl,-Bsymbolic",) if sys.platform.startswith("linux") else ()
    _call([*compiler, "-shared", *_openmp_flags(), *symbolic, *map(str, objects), "-o", str(partial)])
    os.replace(partial, library)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelBuildError(f"{shlex.join(command)}\n{done.stderr}")


class BuildKernels(build_ext):
    """setuptools command for the extension `hfpaged.native._kernels`.

    A machine that cannot compile still gets a working install: the torch attention backend needs no kernels.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """The library is loaded with ctypes, so its name carries no Python version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: object) -> None:
        """Compile the library, or warn that there is none."""
        ext.optional = True
        try:
            compile_library(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp) / "kernels")
        except KernelBuildError as error:
            warnings.warn(f"hfpaged is installed without its CPU kernels: {error}", stacklevel=1)


def main() -> None:
    """Entry point of ``python -m hfpaged.native.build``."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels in place.")
    parser.add_argument("--force", action="store_true", help="recompile everything")
    try:
        built = compile_library(force=parser.parse_args().force)
    except KernelBuildError as error:
        sys.exit(str(error))
    print(f"{'built' if built else 'up to date'}: {LIBRARY}")


if __name__ == "__main__":
    main()

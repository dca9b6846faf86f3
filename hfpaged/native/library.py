"""Loads the compiled kernels with ctypes and declares their C interface (csrc/*.h) in one place.

Importing this module loads nothing: the first call of `load` or `unavailable` does, after torch, so that both use the
OpenMP runtime that torch brings.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

from hfpaged.errors import NativeKernelError

ABI_VERSION = 8
ISA_VARIABLE = "HFPAGED_ISA"
ISAS = ("plain", "avx2", "avx512", "avx512bf16")
DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}

_LIBRARY = Path(__file__).with_name("_kernels.so")
_MEND = "run `python -m hfpaged.native.build --force` (needs g++ or clang++)"


class Batch(ctypes.Structure):
    """HfpBatch: the requests of one step."""

    _fields_ = [
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("table_rows", c_void_p),
        ("block_tables", c_void_p),
        ("slots", c_void_p),
        ("table_stride", c_int64),
        ("num_requests", c_int32),
        ("num_table_rows", c_int32),
        ("block_size", c_int32),
    ]


class Cache(ctypes.Structure):
    """HfpCache: keys and values of one layer."""

    _fields_ = [
        ("key", c_void_p),
        ("value", c_void_p),
        ("dtype", c_int32),
        ("num_blocks", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
    ]


class AttentionArgs(ctypes.Structure):
    """HfpAttentionArgs. Strides are in elements."""

    _fields_ = [
        ("batch", POINTER(Batch)),
        ("cache", POINTER(Cache)),
        ("query", c_void_p),
        ("output", c_void_p),
        ("sinks", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("output_token_stride", c_int64),
        ("output_head_stride", c_int64),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("num_threads", c_int32),
    ]


class WriteKvArgs(ctypes.Structure):
    """HfpWriteKvArgs. Strides are in elements."""

    _fields_ = [
        ("batch", POINTER(Batch)),
        ("cache", POINTER(Cache)),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("num_threads", c_int32),
    ]


class NucleusRow(ctypes.Structure):
    """HfpNucleusRow: a row of scores, and from `least` on what is found out about it."""

    _fields_ = [
        ("scores", c_void_p),
        ("ids", c_void_p),
        ("count", c_int64),
        ("total", c_double),
        ("top_p", c_double),
        ("least", c_float),
        ("surplus", c_int32),
        ("kept", c_int32),
        ("doubtful", c_int32),
    ]


PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "hfp_abi_version": (c_int, ()),
    "hfp_use_isa": (c_int, (c_int,)),
    "hfp_status_message": (c_char_p, (c_int,)),
    "hfp_return_free_memory": (None, ()),
    "hfp_fingerprint": (c_uint64, (c_void_p, c_size_t, c_int)),
    "hfp_attention": (c_int, (POINTER(AttentionArgs),)),
    "hfp_write_kv": (c_int, (POINTER(WriteKvArgs),)),
    "hfp_draw": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int)),
    "hfp_nucleus": (c_int, (POINTER(NucleusRow), c_int32, c_int)),
    "hfp_nucleus_take": (c_int, (POINTER(NucleusRow), c_int32, c_int64, c_void_p, c_void_p, c_int)),
}


def load() -> ctypes.CDLL:
    """The kernel library, loaded on the first call; safe from any thread.

    Raises:
        NativeKernelError: it cannot be used. The message is what `unavailable` returns.
    """
    return _LOADER.load()


def unavailable() -> str | None:
    """Why the kernels cannot be used and how to mend that, in one line. None: they can."""
    try:
        load()
    except NativeKernelError as error:
        return str(error)
    return None


def isa() -> str:
    """Name of the instruction set variant in use, one of `ISAS`."""
    load()
    return _LOADER.isa


def check(status: int) -> None:
    """Raise NativeKernelError unless `status`, the result of an entry point, is HFP_OK (0)."""
    if status:
        raise NativeKernelError(f"the kernels refused their arguments: {load().hfp_status_message(status).decode()}")


def fingerprint(address: int, num_bytes: int, num_threads: int) -> int:
    """64-bit position-sensitive hash of `num_bytes` at `address`; equal for every thread count and instruction set."""
    return load().hfp_fingerprint(address, num_bytes, num_threads)


def return_free_memory() -> None:
    """Give the system what the process has freed and the C library would keep, where it can (glibc)."""
    load().hfp_return_free_memory()


class _Loader:
    """Loads once and remembers the outcome, a failure too."""

    def __init__(self) -> None:
        self.isa = ""
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._failure: str | None = None

    def load(self) -> ctypes.CDLL:
        if self._library is None:
            with self._lock:
                if self._library is None and self._failure is None:
                    try:
                        self._library = self._open()
                    except NativeKernelError as error:
                        self._failure = str(error)
        if self._library is None:
            raise NativeKernelError(self._failure)
        return self._library

    def _open(self) -> ctypes.CDLL:
        wanted = os.environ.get(ISA_VARIABLE) or ISAS[-1]
        if wanted not in ISAS:
            raise NativeKernelError(f"{ISA_VARIABLE} is {wanted!r}: use one of {', '.join(ISAS)}")
        library = _open_library()
        self.isa = ISAS[library.hfp_use_isa(ISAS.index(wanted))]
        if not _is_tested_platform():
            from hfpaged.native.self_test import failure

            problem = failure(library)
            if problem:
                raise NativeKernelError(f"the CPU kernels do not work on this platform: {problem}")
        return library


def _open_library() -> ctypes.CDLL:
    if not _LIBRARY.exists():
        raise NativeKernelError(f"the CPU kernels are not built: {_MEND}")
    import torch  # noqa: F401  its OpenMP runtime must be the one in the process

    try:
        library = ctypes.CDLL(str(_LIBRARY))
        built = library.hfp_abi_version()
        if built != ABI_VERSION:
            raise NativeKernelError(f"the CPU kernels are version {built}, this is {ABI_VERSION}: {_MEND}")
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeKernelError(f"the CPU kernels do not load ({error}): {_MEND}") from error
    return library


def _is_tested_platform() -> bool:
    return sys.platform.startswith("linux") and platform.machine().lower() in ("x86_64", "amd64")


_LOADER = _Loader()

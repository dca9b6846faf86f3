"""Triton's interpreter in the place of a GPU, for models on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from standin.fake_accelerator import FakeAccelerator

from hfpaged.runtime import pool_size
from hfpaged.runtime.attention import interface, triton_backend, triton_launch
from hfpaged.runtime.attention.interface import KVTensors, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Mend the interpreter: it multiplies bfloat16 as if it were integers, checks the range of every integer, and in
    Triton 3.6 makes Python integers in a way that NumPy has given up."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    create_dot = type(builder).create_dot

    def widened(handle: Any) -> Any:
        if str(handle.dtype.scalar) != "bf16":
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(type(builder), "create_dot", dot)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@contextlib.contextmanager
def triton_machine() -> Iterator[FakeAccelerator]:
    """`attention_backend="auto"` chooses Triton for models on the CPU; their pools begin as NaN."""
    device = FakeAccelerator()
    backend = triton_backend.TritonBackend
    allocate, write, attend = backend.allocate, triton_launch.write, triton_launch.attend

    def allocate_poisoned(self: triton_backend.TritonBackend, shape: LayerShape, num_blocks: int) -> KVTensors:
        return tuple(device.on_device.add(tensor.fill_(float("nan"))) for tensor in allocate(self, shape, num_blocks))

    def recordable(function: Any) -> Any:
        def call(kv: KVTensors, *args: Any) -> Any:
            def run() -> Any:
                result = function(kv, *args)
                # What writes to the cache makes nothing of its own.
                return torch.empty(0) if result is None else result

            return run() if device.recorder is None else device.recorder.run_opaque(run)

        return call

    with interpreted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "machine_problem", lambda *_: None)
        patch.setattr(interface, "accelerator_for", lambda _: device)
        patch.setattr(triton_launch, "write", recordable(write))
        patch.setattr(triton_launch, "attend", recordable(attend))
        # Every program takes its time, also one with nothing to do.
        patch.setattr(triton_launch, "SPLITS", 4)
        patch.setattr(triton_launch, "SMALLEST_SPLIT", 16)
        patch.setattr(backend, "device_types", frozenset({"cpu"}))
        patch.setattr(backend, "allocate", allocate_poisoned)
        patch.setattr(NativeBackend, "device_types", frozenset())
        # To poison a pool is to write all of it.
        patch.setattr(pool_size, "MOST_DEFAULT_BLOCKS", 256)
        yield device

"""Puts the fake device and the fake FlashInfer in the place of the real ones, for models on the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
from standin.fake_accelerator import FakeAccelerator
from standin.fake_flashinfer import fake_flashinfer
from standin.fake_wrappers import DTYPES

from hfpaged.quantization import memory_layout
from hfpaged.runtime import pool_size
from hfpaged.runtime.attention import flashinfer_backend, flashinfer_probe, interface
from hfpaged.runtime.attention.interface import KVTensors, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend
from hfpaged.runtime.device import fused_product


class StandIn(NamedTuple):
    """The device and the library that engines made in the block use."""

    device: FakeAccelerator
    library: ModuleType


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """`attention_backend="auto"` chooses FlashInfer for models on the CPU; its pools begin as NaN."""
    device = FakeAccelerator()
    library = fake_flashinfer(device)
    backend = flashinfer_backend.FlashInferBackend
    allocate = backend.allocate

    def allocate_poisoned(self: flashinfer_backend.FlashInferBackend, shape: LayerShape, num_blocks: int) -> KVTensors:
        return tuple(device.on_device.add(tensor.fill_(float("nan"))) for tensor in allocate(self, shape, num_blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        patch.setattr(flashinfer_probe, "package_problem", lambda: None)
        patch.setattr(flashinfer_probe, "DTYPES", DTYPES)
        patch.setattr(flashinfer_backend, "machine_problem", lambda device: None)
        patch.setattr(interface, "accelerator_for", lambda _: device)
        patch.setattr(fused_product, "compute_capability", lambda _: device.capability)
        patch.setattr(memory_layout, "wants_rows", lambda _: True)
        patch.setattr(backend, "device_types", frozenset({"cpu"}))
        patch.setattr(backend, "allocate", allocate_poisoned)
        patch.setattr(NativeBackend, "device_types", frozenset())
        # To poison a pool is to write all of it, and engines under test are many.
        patch.setattr(pool_size, "MOST_DEFAULT_BLOCKS", 256)
        yield StandIn(device, library)

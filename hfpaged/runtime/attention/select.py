"""Choice of the attention backend of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hfpaged.errors import ConfigError
from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import AttentionBackend, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend
from hfpaged.runtime.attention.torch_backend import TorchBackend
from hfpaged.runtime.attention.triton_backend import TritonBackend

# In order of preference; the last one runs everywhere.
BACKENDS: tuple[type[AttentionBackend], ...] = (FlashInferBackend, TritonBackend, NativeBackend, TorchBackend)


class BackendChoice(NamedTuple):
    """The backend in use, and for each one that was preferred but could not be had, by name, why."""

    backend: AttentionBackend
    rejected: dict[str, str]


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
) -> BackendChoice:
    """Create the attention backend for a model.

    Args:
        name: "auto" for the first of `BACKENDS` that is made for the device and can serve the model, or the name of
            one.
        device: where the model is.
        dtype: of keys and values.
        shapes: of all attention layers.
        block_size: tokens per KV block.

    Raises:
        ConfigError: no backend has this name, or it cannot serve the model; the message says why.
    """
    found, rejected = find_backend(name, device, dtype, shapes, block_size)
    return BackendChoice(found(device, dtype, block_size), rejected)


def find_backend(
    name: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[LayerShape], block_size: int
) -> tuple[type[AttentionBackend], dict[str, str]]:
    """`choose_backend` without creating it: (its class, why not the preferred ones)."""
    known = [backend.name for backend in BACKENDS]
    if name != "auto" and name not in known:
        raise ConfigError(f"attention_backend must be one of {', '.join(['auto', *known])}, got {name!r}")
    rejected: dict[str, str] = {}
    for backend in BACKENDS:
        if name == "auto":
            if backend.device_types is not None and device.type not in backend.device_types:
                continue
        elif name != backend.name:
            continue
        reason = backend.unavailable(device, dtype, shapes, block_size)
        if reason is None:
            return backend, rejected
        rejected[backend.name] = reason
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in rejected.items())
    raise ConfigError(f"no attention backend can be used ({reasons})")

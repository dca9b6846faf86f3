"""Accelerator: the few things that the engine asks of a device which works behind the host, in the order told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from hfpaged.errors import ConfigError


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""


class Captured(NamedTuple):
    """Work that can be started again, all at once.

    Attributes:
        outputs: what the captured function returned; a replay writes the same memory.
        replay: starts the work.
    """

    outputs: Any
    replay: Callable[[], None]


class Accelerator(ABC):
    """Work is queued on one stream. Nothing here blocks the host but `Mark.synchronize` and `capture`."""

    def __init__(self, device: torch.device):
        self.device = device

    @abstractmethod
    def active(self) -> AbstractContextManager[Any]:
        """Make it the current device of this thread: libraries launch on whichever that is."""

    @abstractmethod
    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory, [size]: the only kind that is copied without blocking the host."""

    @abstractmethod
    def upload(self, host: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queue a copy of page-locked memory, into `out` if given.

        The host must not write `host` before the device has passed a mark that was set after this call.
        """

    @abstractmethod
    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """Queue a copy into page-locked memory, to be read behind a mark."""

    @abstractmethod
    def mark(self) -> Mark:
        """A point behind all that has been queued."""

    @abstractmethod
    def capture(self, function: Callable[[], Any]) -> Captured:
        """Record what `function` queues.

        Raises:
            Exception: it did something that cannot be recorded, such as waiting for the device.
        """

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes of device memory that can still be taken."""


class CudaAccelerator(Accelerator):
    """A CUDA device, on the stream that is current on the calling thread."""

    def __init__(self, device: torch.device):
        super().__init__(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
        self._pool: Any = None

    def active(self) -> AbstractContextManager[Any]:
        """See `Accelerator.active`."""
        return torch.cuda.device(self.device)

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned`."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Accelerator.upload`."""
        return host.to(self.device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """See `Accelerator.download`."""
        host.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `Accelerator.mark`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def capture(self, function: Callable[[], Any]) -> Captured:
        """See `Accelerator.capture`. All graphs share one memory pool: they never run at the same time."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The caller's other threads may use the device meanwhile; only what this one does is restricted.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        return Captured(outputs, graph.replay)

    def free_memory(self) -> int:
        """See `Accelerator.free_memory`. What PyTorch has reserved and not used counts as free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)


def accelerator_for(device: torch.device) -> Accelerator:
    """The accelerator of a device.

    Raises:
        ConfigError: the device computes when it is told to, as a CPU does, or is of an unknown kind.
    """
    if device.type != "cuda":
        raise ConfigError(f"{device} is no device that works behind the host")
    return CudaAccelerator(device)

"""Accelerator: the few things that the engine asks of a device which works behind the host, in the order told."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hfpaged.errors import ConfigError


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""


class Recording(Protocol):
    """Work that is recorded as it is queued, instead of being started."""

    def end(self) -> Callable[[], None]:
        """Stop recording. The result starts the work, as often as it is called, in the same memory.

        Raises:
            Exception: something was queued that cannot be recorded.
        """


class Accelerator(ABC):
    """Work is queued on one stream. Nothing here blocks the host but `Mark.synchronize`, `beside` and `record`."""

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
    def move_out(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy to new page-locked memory that what is queued behind it does not wait for.

        Nothing may write `source` afterwards. The copy is for `move_in` alone: the host is not told when it is there.
        """

    @abstractmethod
    def move_in(self, host: torch.Tensor) -> torch.Tensor:
        """Queue a copy to the device of what `move_out` returned, or of its first elements."""

    @abstractmethod
    def mark(self) -> Mark:
        """A point behind all that has been queued."""

    @abstractmethod
    def beside(self) -> AbstractContextManager[None]:
        """Queue work that does not wait for what has been queued. The host waits for all of it at the end.

        It may read what the host has waited for (see `mark`), and nothing newer.
        """

    @abstractmethod
    def hand_over(self, tensor: torch.Tensor) -> None:
        """Let what was computed `beside` be read by whoever works on the stream itself."""

    @abstractmethod
    def record(self) -> Recording:
        """Record what this thread queues, until `Recording.end`. Waiting for the device meanwhile is an error."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes of device memory that can still be taken."""


class StreamAccelerator(Accelerator):
    """A GPU, on the stream that is current on the calling thread.

    Args:
        api: PyTorch's module for devices of its kind: `torch.cuda`, or `torch.xpu`, which has the same functions.
        graph: of that module, how recorded work is called.
        capture_options: of its `capture_begin`.
    """

    def __init__(self, device: torch.device, api: Any, graph: str, capture_options: Mapping[str, Any]):
        super().__init__(torch.device(device.type, api.current_device()) if device.index is None else device)
        self._api = api
        self._graph, self._capture_options = graph, capture_options
        self._copying = api.Stream(self.device)
        # Of its own: the few numbers that a step needs do not wait for blocks.
        self._moving = api.Stream(self.device)
        self._beside = api.Stream(self.device)
        self._recording = api.Stream(self.device)
        self._pool: Any = None

    def active(self) -> AbstractContextManager[Any]:
        """See `Accelerator.active`."""
        return self._api.device(self.device)

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned`."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, host: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Accelerator.upload`. The copy need not wait for the step that is running."""
        arrived = self._arrived(host, self._copying)
        return arrived if out is None else out.copy_(arrived, non_blocking=True)

    def _arrived(self, host: torch.Tensor, side: torch.Stream) -> torch.Tensor:
        """A copy that is made on another stream, and that the stream itself waits for."""
        stream = self._api.current_stream(self.device)
        with self._api.stream(side):
            arrived = host.to(self.device, non_blocking=True)
        stream.wait_stream(side)
        # As in `move_out`.
        arrived.record_stream(stream)
        return arrived

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        """See `Accelerator.download`."""
        host.copy_(source, non_blocking=True)

    def move_out(self, source: torch.Tensor) -> torch.Tensor:
        """See `Accelerator.move_out`."""
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._moving.wait_stream(self._api.current_stream(self.device))
        with self._api.stream(self._moving):
            host.copy_(source, non_blocking=True)
        # Its memory was taken on the other stream, which would take it again too early.
        source.record_stream(self._moving)
        return host

    def move_in(self, host: torch.Tensor) -> torch.Tensor:
        """See `Accelerator.move_in`. On the stream that the copies out are on, so that it comes behind them."""
        return self._arrived(host, self._moving)

    def mark(self) -> Mark:
        """See `Accelerator.mark`."""
        event = self._api.Event()
        event.record(self._api.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See `Accelerator.beside`."""
        with self._api.stream(self._beside):
            yield
        self._beside.synchronize()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """See `Accelerator.hand_over`."""
        tensor.record_stream(self._api.current_stream(self.device))

    def record(self) -> Recording:
        """See `Accelerator.record`. All graphs share one memory pool: they never run at the same time."""
        if self._pool is None:
            self._pool = self._api.graph_pool_handle()
        self._api.synchronize(self.device)
        graph = getattr(self._api, self._graph)()
        return StreamRecording(graph, self._api.stream(self._recording), {"pool": self._pool, **self._capture_options})

    def free_memory(self) -> int:
        """See `Accelerator.free_memory`. What PyTorch has reserved and not used counts as free."""
        free, _ = self._api.mem_get_info(self.device)
        return free + self._api.memory_reserved(self.device) - self._api.memory_allocated(self.device)


class StreamRecording:
    """A graph that is being captured on a stream. PyTorch's `graph` would leave it current where that fails."""

    def __init__(self, graph: Any, stream: AbstractContextManager[Any], options: Mapping[str, Any]):
        self._graph = graph
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            self._graph.capture_begin(**options)
            self._stream = stack.pop_all()

    def end(self) -> Callable[[], None]:
        """See `Recording.end`."""
        with self._stream:
            self._graph.capture_end()
        return self._graph.replay


def accelerator_for(device: torch.device) -> Accelerator:
    """The accelerator of a device.

    Raises:
        ConfigError: the device computes when it is told to, as a CPU does, or is of an unknown kind.
    """
    if device.type == "cuda":
        # Other threads may use the device while work is recorded; only what this one does is restricted.
        return StreamAccelerator(device, torch.cuda, "CUDAGraph", {"capture_error_mode": "thread_local"})
    if device.type == "xpu":
        return StreamAccelerator(device, torch.xpu, "XPUGraph", {})
    raise ConfigError(f"{device} is no device that works behind the host")

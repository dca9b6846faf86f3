"""A device that works behind the host, in a process that has none: it computes at once, but forgives nothing.

Memory is either page-locked, on the device, or neither. Copies count as being under way until the host has waited for
a mark behind them: what a download brought cannot be seen before, and what an upload reads may not be written before.
Captured work is a list of operations over fixed memory, as a CUDA graph is: a replay runs no Python of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hfpaged.runtime.device.accelerator import Accelerator, Mark, Recording

CPU = torch.device("cpu")
POISON = -12345


class DeviceError(AssertionError):
    """The engine did what a real device would answer with wrong numbers, or with waiting."""


class Storages:
    """A set of memory areas that does not keep them alive."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = reference
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        reference = self._known.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()


class Upload(NamedTuple):
    """A copy to the device that is under way."""

    host: torch.Tensor
    content: torch.Tensor
    number: int


class Download(NamedTuple):
    """A copy from the device that is under way."""

    content: torch.Tensor
    host: torch.Tensor
    number: int


class Move(NamedTuple):
    """A copy from the device beside the steps. The host never knows when it is there, and sees none of it."""

    source: torch.Tensor
    content: torch.Tensor
    host: StorageWeakRef


class FakeMark:
    """A point in the fake device's work."""

    def __init__(self, device: FakeAccelerator, number: int):
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.complete(self._number)


class FakeAccelerator(Accelerator):
    """See the module.

    Attributes:
        host_waits: how often the host had to wait for work that was not known to be done.
        captures, replays: how many.
        recorder: what records now, if anything does.
        moved_out: how many tensors were copied out beside the stream.
        turns_beside: how often work was queued beside the stream.
        handed_over: shapes of what came from there.
        replaying: recording and number of the replay that runs now; None outside.
        fails_to_capture: makes the next captures fail.
        capability: its compute capability.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.page_locked, self.on_device = Storages(), Storages()
        self.host_waits = self.captures = self.replays = 0
        self.recorder: Recorder | None = None
        self.moved_out = self.turns_beside = 0
        self.handed_over: list[torch.Size] = []
        self.replaying: tuple[int, int] | None = None
        self.fails_to_capture = False
        self.capability = (9, 0)
        self.memory = 1 << 40
        self.memory_of_a_capture = 0
        self._queued = self._completed = 0
        self._uploads: list[Upload] = []
        self._downloads: list[Download] = []
        self._moves: list[Move] = []

    # ---- the interface ----

    def active(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return self.page_locked.add(torch.full((size,), -1, dtype=dtype))

    def upload(self, host: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.forbid_while_capturing("copying from the host")
        self.start_reading(host)
        if out is None:
            return self.on_device.add(host.clone())
        return out.copy_(host)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> None:
        self.forbid_while_capturing("copying to the host")
        if host not in self.page_locked:
            raise DeviceError("a copy to pageable memory blocks the host")
        self._downloads.append(Download(source.clone(), host, self.queue()))
        host.fill_(POISON)

    def move_out(self, source: torch.Tensor) -> torch.Tensor:
        self.forbid_while_capturing("copying to the host")
        host = self.page_locked.add(torch.empty_like(source))
        self._moves.append(Move(source, source.clone(), StorageWeakRef(host.untyped_storage())))
        host.fill_(POISON)
        self.moved_out += 1
        return host

    def move_in(self, host: torch.Tensor) -> torch.Tensor:
        self.forbid_while_capturing("copying from the host")
        self._check_moves()
        found = [move for move in self._moves if move.host.cdata == host.untyped_storage()._cdata]
        if not found:
            raise DeviceError("only what was moved out comes back")
        return self.on_device.add(found[0].content[: len(host)].clone())

    def mark(self) -> Mark:
        return FakeMark(self, self._queued)

    def beside(self) -> AbstractContextManager[None]:
        self.forbid_while_capturing("waiting for the device")
        self.turns_beside += 1
        return contextlib.nullcontext()

    def hand_over(self, tensor: torch.Tensor) -> None:
        self.handed_over.append(tensor.shape)

    def record(self) -> Recording:
        if self.fails_to_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.forbid_while_capturing("recording")
        self.captures += 1
        self.memory -= self.memory_of_a_capture
        self.recorder = Recorder(self)
        return self.recorder

    def free_memory(self) -> int:
        return self.memory

    # ---- for the fake libraries ----

    def queue(self) -> int:
        """Number of the next piece of work."""
        self._queued += 1
        return self._queued

    def is_done(self, number: int) -> bool:
        """Whether the host can know that the work is done."""
        return number <= self._completed

    def start_reading(self, host: torch.Tensor) -> None:
        """A copy out of host memory is queued."""
        if host not in self.page_locked:
            raise DeviceError("a copy from pageable memory blocks the host")
        self._check_uploads()
        self._uploads.append(Upload(host, host.clone(), self.queue()))

    def complete(self, number: int) -> None:
        """The host has waited for work up to `number`."""
        self.forbid_while_capturing("waiting for the device")
        self._check_uploads()
        self.host_waits += number > self._completed
        self._completed = max(self._completed, number)
        self._uploads = [copy for copy in self._uploads if not self.is_done(copy.number)]
        for copy in [copy for copy in self._downloads if self.is_done(copy.number)]:
            copy.host.copy_(copy.content)
            self._downloads.remove(copy)
        self._check_moves()

    def forbid_while_capturing(self, what: str) -> None:
        """Fail if work is being recorded."""
        if self.recorder is not None:
            raise DeviceError(f"{what} is not permitted while capturing")

    def _check_moves(self) -> None:
        self._moves = [move for move in self._moves if not move.host.expired()]
        for move in self._moves:
            if not torch.equal(_bits(move.source), _bits(move.content)):
                raise DeviceError("memory was written while it was being copied out")

    def _check_uploads(self) -> None:
        for copy in self._uploads:
            if not torch.equal(copy.host, copy.content):
                raise DeviceError("page-locked memory was written while the device was reading it")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Comparable, also where it is no number."""
    return tensor.contiguous().view(torch.uint8)


# What a stream cannot do while it is being captured: their results, or the shapes of them, are the host's to know.
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Recorder(TorchDispatchMode):
    """Runs operations and remembers them with the memory they read and wrote."""

    def __init__(self, device: FakeAccelerator) -> None:
        super().__init__()
        self._device = device
        self._work: list[Callable[[], None]] = []
        self._made: dict[int, torch.Tensor] = {}
        self.__enter__()

    def end(self) -> Callable[[], None]:
        self.__exit__(None, None, None)
        self._device.recorder = None
        # On a real device nothing has been computed yet.
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return self.replay

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _WAITING or _indexes_by_mask(function, args) or _copies_a_number(function, args):
            raise RuntimeError(f"{function} is not permitted when stream is capturing")
        result = function(*args, **kwargs)
        self._note_made(result, (args, kwargs))
        self._work.append(lambda: _copy_into(result, function(*args, **kwargs)))
        return result

    def run_opaque(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run and remember a kernel that is not PyTorch's."""
        with _disable_current_modes():
            result = function()
        self._note_made(result, ())
        self._work.append(lambda: result.copy_(function()))
        return result

    def replay(self) -> None:
        """Do it all again in the same memory."""
        self._device.replays += 1
        self._device.replaying = (id(self), self._device.replays)
        try:
            with torch.no_grad():
                for work in self._work:
                    work()
        finally:
            self._device.replaying = None

    def _note_made(self, results: Any, arguments: Any) -> None:
        """Keep results that are memory of the recording's own."""
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(arguments)}
        for tensor in _tensors(results):
            if tensor.untyped_storage()._cdata not in given:
                self._made[tensor.untyped_storage()._cdata] = tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _indexes_by_mask(function: Any, args: Any) -> bool:
    if function not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _copies_a_number(function: Any, args: Any) -> bool:
    """Whether a number is made a tensor on the host, which the operation would copy to the device."""
    numbers = (argument for argument in args if isinstance(argument, torch.Tensor) and argument.dim() == 0)
    return function is torch.ops.aten.where.self and any(True for _ in numbers)


def _copy_into(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
            old.copy_(new)
    elif isinstance(old, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            _copy_into(one, other)


@contextlib.contextmanager
def no_waiting_operations(device: FakeAccelerator) -> Iterator[None]:
    """Fail on operations that would make the host wait for a device, but for those on its page-locked memory."""
    with _WaitingWatch(device):
        yield


class _WaitingWatch(torch.overrides.TorchFunctionMode):
    _NAMES = frozenset(
        {"item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "masked_select"}
    )

    def __init__(self, device: FakeAccelerator):
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self._NAMES and args[0] not in self._device.page_locked:
            raise DeviceError(f"Tensor.{name} makes the host wait for the device")
        if name == "__getitem__" and _has_mask(args[1]):
            raise DeviceError("indexing by a mask makes the host wait for the device")
        if name == "where" and any(isinstance(argument, (int, float)) for argument in args):
            raise DeviceError("a number in `where` is copied to the device")
        return function(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)

"""What the accelerator asks of PyTorch's API for CUDA, or XPU, in which order, by a recording stand-in for it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hfpaged.errors import ConfigError
from hfpaged.runtime.device.accelerator import accelerator_for


class Cuda:
    """Streams, events and graphs that note what is done with them; `current` is the stream of the moment."""

    def __init__(self):
        self.log: list[tuple] = []
        self.current = "ordinary"
        self.count = 0
        self.capture_fails = False

    def make_stream(self, device):
        self.count += 1
        return Stream(self, f"stream {self.count}", device)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def note(self, *what):
        self.log.append((self.current, *what))


class Stream:
    def __init__(self, cuda, name, device):
        self.cuda, self.name, self.device = cuda, name, device

    def wait_stream(self, other):
        self.cuda.log.append((self.name, "waits for", other.name))

    def synchronize(self):
        self.cuda.note("host waits for", self.name)


class Graph:
    def __init__(self, cuda):
        self.cuda = cuda

    def capture_begin(self, pool, **options):
        self.cuda.note("begins", pool, options)

    def capture_end(self):
        if self.cuda.capture_fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.note("ends")

    def replay(self):
        self.cuda.note("replay")


class Host:
    """Page-locked memory."""

    def __init__(self, cuda):
        self.cuda = cuda

    def to(self, device, non_blocking):
        self.cuda.note("copy to", str(device), non_blocking)
        return Arrived(self.cuda)


class Arrived:
    """Device memory that a copy was made to."""

    def __init__(self, cuda):
        self.cuda = cuda

    def record_stream(self, stream):
        self.cuda.note("memory is read on", stream.name)


class PageLocked(Host):
    """What blocks are copied out to."""

    def __init__(self, cuda, is_page_locked):
        super().__init__(cuda)
        self.is_page_locked = is_page_locked

    def copy_(self, source, non_blocking):
        self.cuda.note("copy from the device", self.is_page_locked, non_blocking)


class Source(Arrived):
    """Device memory that is copied out."""

    shape, dtype = torch.Size([2]), torch.float32


class Target:
    """Memory of a captured step."""

    def __init__(self, cuda):
        self.cuda = cuda

    def copy_(self, source, non_blocking):
        self.cuda.note("copy on the device", non_blocking)
        return self


@pytest.fixture(params=["cuda", "xpu"])
def kind(request):
    return request.param


@pytest.fixture
def cuda(kind, monkeypatch):
    cuda, api = Cuda(), getattr(torch, kind)
    monkeypatch.setattr(api, "Stream", cuda.make_stream)
    monkeypatch.setattr(api, "stream", cuda.on)
    monkeypatch.setattr(api, "current_stream", lambda device: Stream(cuda, cuda.current, device))
    monkeypatch.setattr(api, "synchronize", lambda device: cuda.note("host waits for all"))
    monkeypatch.setattr(api, {"cuda": "CUDAGraph", "xpu": "XPUGraph"}[kind], lambda: Graph(cuda))
    monkeypatch.setattr(api, "graph_pool_handle", lambda: "pool")
    return cuda


@pytest.fixture
def accelerator(cuda, kind):
    return accelerator_for(torch.device(kind, 0))


def test_a_cpu_does_not_work_behind_the_host():
    with pytest.raises(ConfigError, match="cpu is no device that works behind the host"):
        accelerator_for(torch.device("cpu"))


def test_uploads_go_over_a_stream_of_their_own_and_the_step_waits_for_them(cuda, accelerator, kind):
    accelerator.upload(Host(cuda))
    copying = cuda.log[0][0]
    assert copying != "ordinary"
    assert cuda.log == [
        (copying, "copy to", f"{kind}:0", True),
        ("ordinary", "waits for", copying),
        ("ordinary", "memory is read on", "ordinary"),
    ]


def test_memory_that_a_step_may_still_read_is_written_in_the_order_of_steps(cuda, accelerator):
    """A replay reads the same memory as the one before: the copy into it must not overtake that one."""
    target = Target(cuda)
    assert accelerator.upload(Host(cuda), target) is target
    assert cuda.log[-1] == ("ordinary", "copy on the device", True)


def test_blocks_go_out_beside_the_steps_and_come_back_behind_that(cuda, accelerator, monkeypatch, kind):
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: PageLocked(cuda, pin_memory))
    host = accelerator.move_out(Source(cuda))
    moving = cuda.log[0][0]
    assert moving != "ordinary"
    # The copy waits for what fills its source. Nobody waits for the copy.
    assert cuda.log == [
        (moving, "waits for", "ordinary"),
        (moving, "copy from the device", True, True),
        ("ordinary", "memory is read on", moving),
    ]
    cuda.log.clear()
    accelerator.move_in(host)
    assert cuda.log == [
        (moving, "copy to", f"{kind}:0", True),
        ("ordinary", "waits for", moving),
        ("ordinary", "memory is read on", "ordinary"),
    ]
    cuda.log.clear()
    accelerator.upload(Host(cuda))
    assert cuda.log[0][0] not in ("ordinary", moving)


def test_work_beside_the_steps_is_waited_for_and_nothing_else(cuda, accelerator):
    with accelerator.beside():
        cuda.note("draw")
    beside = cuda.log[0][0]
    assert beside != "ordinary"
    assert cuda.log[1:] == [("ordinary", "host waits for", beside)]
    accelerator.hand_over(Arrived(cuda))
    assert cuda.log[-1] == ("ordinary", "memory is read on", "ordinary")


def test_recordings_share_a_pool_and_leave_the_stream_as_it_was(cuda, accelerator, kind):
    for _ in range(2):
        recording = accelerator.record()
        cuda.note("work")
        start = recording.end()
        start()
    recorded = cuda.log[1][0]
    assert recorded != "ordinary"
    assert cuda.log[: len(cuda.log) // 2] == [
        ("ordinary", "host waits for all"),
        (recorded, "begins", "pool", {"capture_error_mode": "thread_local"} if kind == "cuda" else {}),
        (recorded, "work"),
        (recorded, "ends"),
        ("ordinary", "replay"),
    ]
    assert cuda.log[5:] == cuda.log[:5]


def test_a_recording_that_fails_leaves_the_stream_as_it_was(cuda, accelerator):
    recording = accelerator.record()
    cuda.capture_fails = True
    with pytest.raises(RuntimeError, match="during capture"):
        recording.end()
    assert cuda.current == "ordinary"

"""What a stand-in of FlashInfer says of a wrong call, and the page tables that all its wrappers check."""

from __future__ import annotations

from typing import Any

import torch
from standin.fake_accelerator import FakeAccelerator


class Misuse(AssertionError):
    """A call that the library would answer with wrong numbers, a crash or a pause."""


def require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Misuse(otherwise)


class Tables:
    """The page tables of a plan, checked."""

    def __init__(
        self,
        device: FakeAccelerator,
        query_start: torch.Tensor | None,
        page_start: torch.Tensor,
        pages: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
    ):
        host = {"page_start": page_start, "last_page_len": last_page_len}
        if query_start is not None:
            host["query_start"] = query_start
        for name, tensor in {**host, "pages": pages}.items():
            require(tensor.dtype is torch.int32, f"{name} is {tensor.dtype}, which is read as int32")
            require(tensor.is_contiguous() and tensor.dim() == 1, f"{name} is not a contiguous vector")
        for name, tensor in host.items():
            require(tensor not in device.on_device, f"{name} is on the device: plan() would wait for it")
            device.start_reading(tensor)
        require(pages in device.on_device, "the pages are not on the device")
        self.requests = len(last_page_len)
        self.page_start = page_start.tolist()
        self.last_page_len = last_page_len.tolist()
        self.query_start = list(range(self.requests + 1)) if query_start is None else query_start.tolist()
        for name, starts in (("page_start", self.page_start), ("query_start", self.query_start)):
            require(len(starts) == self.requests + 1, f"{name} has {len(starts)} entries")
            require(starts[0] == 0 and starts == sorted(set(starts)), f"{name} is not ascending: an empty request")
        require(all(1 <= one <= page_size for one in self.last_page_len), "a last_page_len is out of range")
        require(len(pages) >= self.page_start[-1], "there are fewer pages than page_start says")
        for request in range(self.requests):
            queries = self.query_start[request + 1] - self.query_start[request]
            require(self.length(request, page_size) >= queries, "a request has more queries than tokens")

    def length(self, request: int, page_size: int) -> int:
        """Tokens of a request."""
        pages = self.page_start[request + 1] - self.page_start[request]
        return (pages - 1) * page_size + self.last_page_len[request]

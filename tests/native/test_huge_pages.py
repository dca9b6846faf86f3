"""Memory on huge pages: aligned, zero, and big enough for what is placed in it."""

from __future__ import annotations

import torch

from hfpaged.native.huge_pages import HUGE_PAGE_BYTES, Arena, zeroed


def test_memory_is_zero_and_begins_at_a_huge_page():
    memory = zeroed(5)
    assert memory.tolist() == [0] * 5 and memory.data_ptr() % HUGE_PAGE_BYTES == 0


def test_tensors_lie_side_by_side_as_they_were():
    arena = Arena(block_bytes=4096)
    shapes = [((3, 5), torch.int32), ((7,), torch.uint8), ((0, 4), torch.uint8), ((2000, 2), torch.int64)]
    tensors = [torch.randint(0, 100, shape, dtype=dtype) for shape, dtype in shapes]
    placed = [arena.place(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, placed, strict=True):
        assert torch.equal(tensor, copy) and copy.dtype is tensor.dtype and copy.is_contiguous()
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert copy.data_ptr() % 64 == 0
    assert placed[1].data_ptr() == placed[0].data_ptr() + 64
    placed[0].zero_()
    assert torch.equal(placed[1], tensors[1])

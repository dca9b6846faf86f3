"""Memory of logits is used again when nothing refers to it any more, and not before."""

from __future__ import annotations

from hfpaged.program import logits_memory
from hfpaged.program.logits_memory import LogitsMemory


def test_a_block_is_taken_again_once_the_last_view_of_it_is_gone():
    memory = LogitsMemory()
    first = memory.take(4, 100)
    address, row = first.data_ptr(), first[1]
    del first
    second = memory.take(4, 100)
    assert second.data_ptr() != address
    del row
    assert memory.take(3, 100).data_ptr() == address


def test_steps_that_are_kept_do_not_share_memory():
    memory = LogitsMemory()
    steps = []
    for index in range(5):
        steps.append(memory.take(2, 3).fill_(index))
    assert [float(step.sum()) for step in steps] == [6.0 * index for index in range(5)]


def test_a_larger_step_gets_memory_of_its_own_size():
    memory = LogitsMemory()
    memory.take(1, 10)
    assert memory.take(8, 10).fill_(1.0).shape == (8, 10)


def test_a_step_of_no_rows_has_no_logits():
    assert LogitsMemory().take(0, 10).shape == (0, 10)


def test_very_large_blocks_go_back_to_the_system(monkeypatch):
    monkeypatch.setattr(logits_memory, "MOST_BYTES_KEPT", 1000)
    memory = LogitsMemory()
    large = memory.take(1001, 1)
    del large
    assert memory._free == []

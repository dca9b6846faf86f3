"""KV blocks that a device copies, moves out and gets back, while the host goes on."""

from __future__ import annotations

import pytest
import torch
from batches import left_padded, random_prompts
from families import build_tiny
from internals import workspace_of
from standin.fake_accelerator import POISON, DeviceError, no_waiting_operations

import hfpaged
from hfpaged.runtime.device.queued_mover import QueuedMover

BLOCKS = 6


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def tensors(request):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BLOCKS, 4, 2, dim, generator=generator).to(request.param) for dim in (3, 5)]


def test_blocks_are_copied_within_the_pool(cuda, tensors):
    before = [tensor.clone() for tensor in tensors]
    with no_waiting_operations(cuda.device):
        QueuedMover(cuda.device, tensors).copy(((0, 3), (0, 4), (2, 1)))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 2, 2, 0, 0, 5]])
    assert cuda.device.host_waits == 0


def test_blocks_that_were_moved_out_come_back_as_they_were_and_the_host_waits_for_none(cuda, tensors):
    before = [tensor.clone() for tensor in tensors]
    mover = QueuedMover(cuda.device, tensors)
    with no_waiting_operations(cuda.device):
        content = mover.read((4, 1, 2))
        # Their blocks have other contents right away.
        for tensor in tensors:
            tensor.fill_(7)
        mover.write((0, 5), content)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 5]], old[[4, 1]])
        assert (tensor[1:5] == 7).all()
    assert cuda.device.host_waits == 0
    assert all((saved == saved.new_tensor(POISON)).all() for saved in content)


def test_the_stand_in_notices_memory_that_is_written_on_its_way_out(cuda):
    source = torch.ones(4)
    host = cuda.device.move_out(source)
    source.add_(1)
    with pytest.raises(DeviceError, match="written while it was being copied out"):
        cuda.device.move_in(host)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "num_return_sequences": 3, "hfpaged": {"seed": 1}}])
def test_steps_that_swap_and_fork_wait_for_nothing(cuda, options):
    prompts = random_prompts((20, 33, 30))
    call = {**left_padded(prompts), "max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": 0, **options}
    model = build_tiny("llama")
    with hfpaged.patched(model):
        want = model.generate(**call)
    with hfpaged.patched(model, num_blocks=7, preemption="swap"):
        engine = hfpaged.engine(model)
        engine.submit([5], max_new_tokens=1).result(30)
        runner = workspace_of(engine).runner
        run = runner.run

        def strictly(*args):
            with no_waiting_operations(cuda.device):
                return run(*args)

        runner.run = strictly
        assert torch.equal(model.generate(**call), want)
        assert engine.stats()["preemptions_swap"] > 0
    assert cuda.device.moved_out > 0

"""StepProgram: weights that change, arguments that are wrong, steps that sample nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build_tiny
from program.stepping import Stepper

from hfpaged.errors import NativeKernelError
from hfpaged.program.description import NotRecognized
from hfpaged.program.program import StepProgram

PROMPT = [5, 9, 14, 22, 3, 70, 41]


@pytest.fixture
def model():
    return build_tiny("llama")


@pytest.fixture
def program(model):
    return StepProgram.build(model, num_threads=1)


def last_logits(program: StepProgram) -> torch.Tensor:
    stepper = Stepper(program, max_requests=1)
    stepper.prefill(stepper.add(PROMPT), chunk=64)
    return stepper.requests[0].logits[-1]


def expected(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -1]


def change_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.full_like(parameter, 0.02)).mul_(1.1)


def replace_storage(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2


def assign_parameters(model: torch.nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [change_in_place, replace_storage, assign_parameters])
def test_repacking_follows_changed_weights(model, program, change):
    before = last_logits(program)
    change(model)
    program.repack()
    assert not torch.allclose(before, last_logits(program), atol=1e-3)
    torch.testing.assert_close(last_logits(program), expected(model), rtol=1e-4, atol=1e-4)


def test_repacking_some_modules_takes_over_those(model, program):
    changed, other = model.model.layers[0].mlp.down_proj, model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        changed.weight.mul_(1.5)
    wanted = expected(model)
    with torch.no_grad():
        other.weight.mul_(1.5)
    program.repack([changed])
    torch.testing.assert_close(last_logits(program), wanted, rtol=1e-4, atol=1e-4)


def test_repacking_refuses_weights_of_another_dtype(model, program):
    model.to(torch.bfloat16)
    with pytest.raises(NotRecognized, match="bfloat16"):
        program.repack()


def test_packed_bytes_count_every_matrix(model, program):
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(linear.weight.numel() * 4 for linear in linears)
    # Every panel has 64 columns: matrices whose width is no multiple of that take more.
    assert weights <= program.packed_bytes <= 1.5 * weights


def test_argmax_is_the_first_of_equal_logits():
    model = build_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[20:] = model.lm_head.weight[:1]
        model.lm_head.weight[:20] = -model.lm_head.weight[20:40]
    program = StepProgram.build(model, num_threads=4, min_thread_seconds=0)
    for seed in range(4):
        stepper = Stepper(program, max_requests=1)
        best = stepper.prefill(stepper.add([seed + 1, 5]), chunk=2)
        assert best == int(stepper.requests[0].logits[-1].argmax())
        assert best in (0, 20)


def test_a_step_without_sampled_rows_only_fills_the_cache(program):
    whole, parts = Stepper(program, max_requests=1), Stepper(program, max_requests=1)
    whole.prefill(whole.add(PROMPT), chunk=64)
    request = parts.add(PROMPT)
    batch = parts.batch([(request, 4)])
    argmax, logits = program.run(batch, parts.kv, np.empty(0, dtype=np.int64), want_logits=True)
    assert argmax.shape == (0,)
    assert logits.shape == (0, 128)
    request.done = 4
    parts.prefill(request, chunk=64)
    assert torch.equal(whole.requests[0].logits[-1], parts.requests[0].logits[-1])


def test_logits_are_computed_only_when_asked_for(program):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    argmax, logits = program.run(batch, stepper.kv, np.array([6]), want_logits=False)
    assert logits is None
    assert argmax[0] == last_logits(program).argmax()


def test_positions_beyond_the_first_table_make_it_grow(model):
    program = StepProgram.build(model, num_threads=1)
    stepper = Stepper(program, max_requests=1, max_blocks=80)
    tokens = [3 + i % 100 for i in range(1200)]
    stepper.prefill(stepper.add(tokens), chunk=500)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(stepper.requests[0].logits[-1], wanted, rtol=1e-3, atol=1e-3)


def wrong_token(batch):
    batch.token_ids[0] = 128


def negative_position(batch):
    batch.positions[0] = -1


def far_block(batch):
    batch.block_tables[:] = 10_000


def short_context(batch):
    batch.context_len[:] = 2


@pytest.mark.parametrize(
    "fault, message",
    [
        (wrong_token, "token id"),
        (negative_position, "position"),
        (far_block, "block tables"),
        (short_context, "lengths"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(program, fault, message):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    fault(batch)
    with pytest.raises(NativeKernelError, match=message):
        program.run(batch, stepper.kv, np.array([6]))


def test_a_sampled_row_outside_the_step_is_refused(program):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    with pytest.raises(NativeKernelError, match="sampled row"):
        program.run(batch, stepper.kv, np.array([len(PROMPT)]))


def test_arrays_of_another_dtype_are_refused(program):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    batch.positions = batch.positions.astype(np.int32)
    with pytest.raises(NativeKernelError, match="int32"):
        program.run(batch, stepper.kv, np.array([6]))


def test_a_cache_of_another_dtype_or_size_is_refused(program):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    half = [tuple(tensor.half() for tensor in pair) for pair in stepper.kv]
    narrow = [tuple(tensor[:, :-1].contiguous() for tensor in pair) for pair in stepper.kv]
    for kv in (half, narrow, stepper.kv[:-1]):
        with pytest.raises(NativeKernelError, match="KV cache"):
            program.run(batch, kv, np.array([6]))


def test_a_slot_beyond_the_cache_is_refused(program):
    stepper = Stepper(program, max_requests=1)
    batch = stepper.batch([(stepper.add(PROMPT), len(PROMPT))])
    batch.slots[3] = stepper.tables.size * stepper.block_size
    with pytest.raises(NativeKernelError, match="slots"):
        program.run(batch, stepper.kv, np.array([6]))

"""Steps of many rows give each thread rows of its own: same bits as on one thread, wherever the cuts are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from families import VOCAB_SIZE, build_tiny
from program.stepping import Stepper
from transformers import PreTrainedModel

from hfpaged.errors import NativeKernelError
from hfpaged.program.program import StepProgram

LEAST_ROWS = 32  # of a part


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_neox"])
def model(request) -> PreTrainedModel:
    return build_tiny(request.param).to(torch.bfloat16)


def texts(*lengths: int) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run_steps(program: StepProgram, prompts: list[list[int]], works: list[list[int]]) -> list[torch.Tensor]:
    """Logits of the sampled rows, and their argmax alone, of steps with so many tokens of each prompt."""
    stepper = Stepper(program, max_requests=len(prompts), max_blocks=16)
    requests = [stepper.add(prompt) for prompt in prompts]
    results = []
    for work in works:
        pairs = [(request, count) for request, count in zip(requests, work, strict=True) if count]
        batch = stepper.batch(pairs)
        last = batch.query_start[1:].astype(np.int64) - 1
        for sampled in (last, last[1::2].copy(), last[:0]):
            results += [torch.from_numpy(program.run(batch, stepper.kv, sampled)[0])]
            results += [program.run(batch, stepper.kv, sampled, want_logits=True)[1]]
        for request, count in pairs:
            request.done += count
    return results


@pytest.mark.parametrize(
    ("lengths", "works"),
    [
        ([250], [[250]]),  # all parts but the first need the keys of all before them
        ([90, 200, 40], [[90, 100, 1], [0, 99, 39]]),
        ([200] + [30] * 100, [[20] + [29] * 100, [180] + [1] * 100]),  # one request costs more than a part
    ],
)
def test_cuts_change_no_bit(model, lengths, works):
    prompts = texts(*lengths)
    expected = run_steps(StepProgram.build(model, 1), prompts, works)
    for threads in (2, 3, 4):
        results = run_steps(StepProgram.build(model, threads, min_thread_seconds=0), prompts, works)
        assert all(map(torch.equal, results, expected))


def test_a_step_that_does_not_fit_its_tables_is_refused_before_anything_runs():
    program = StepProgram.build(build_tiny("llama"), 2, min_thread_seconds=0)
    stepper = Stepper(program, max_requests=1, max_blocks=8)
    batch = stepper.batch([(stepper.add(texts(2 * LEAST_ROWS)[0]), 2 * LEAST_ROWS)])
    batch.context_len[0] = 16 * 8 + 1
    with pytest.raises(NativeKernelError, match="do not fit"):
        program.run(batch, stepper.kv, np.array([2 * LEAST_ROWS - 1]))
    assert not any(tensor.any() for pair in stepper.kv for tensor in pair)

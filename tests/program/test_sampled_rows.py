"""The last layer computes only what the sampled rows need: no choice of these changes a bit of any."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build_tiny
from program.stepping import Stepper

from hfpaged.program.program import StepProgram
from hfpaged.program.step_arrays import KVPairs

TOKENS = [5, 9, 14, 22, 3, 70, 41, 8, 77, 100, 2, 19]
# What follows the last attention: a plain layer, parallel branches with two norms and with one, norms behind the
# branches, and experts.
FAMILIES = ["llama", "gpt_neox", "cohere2", "gemma2", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def program(request) -> StepProgram:
    return StepProgram.build(build_tiny(request.param).to(torch.bfloat16), num_threads=2, min_thread_seconds=0)


def run(program: StepProgram, rows: list[int]) -> tuple[np.ndarray, torch.Tensor, KVPairs]:
    """A step of two requests that samples `rows`: argmax, logits, and the pool, which has nothing else in it."""
    stepper = Stepper(program, max_requests=2)
    batch = stepper.batch([(stepper.add(TOKENS[:7]), 7), (stepper.add(TOKENS[7:]), 5)])
    argmax, logits = program.run(batch, stepper.kv, np.array(rows, dtype=np.int64), want_logits=True)
    return argmax, logits, stepper.kv


@pytest.mark.parametrize("rows", [[6], [2, 3, 4, 11], [9, 0, 9], [*range(12), *range(12)]])
def test_rows_have_the_same_bits_whichever_others_are_sampled(program, rows):
    every_argmax, every_logits, _ = run(program, list(range(len(TOKENS))))
    argmax, logits, _ = run(program, rows)
    assert torch.equal(logits, every_logits[rows])
    assert argmax.tolist() == every_argmax[rows].tolist()


def test_keys_and_values_of_all_tokens_are_written_whichever_rows_are_sampled(program):
    *some, every = (run(program, rows)[2] for rows in ([], [3], list(range(len(TOKENS)))))
    for kv in some:
        for written, wanted in zip(kv, every, strict=True):
            assert all(map(torch.equal, written, wanted))
    for tensor in every[-1]:
        assert tensor.count_nonzero() > 0

"""In bf16, a request's logits are the same bits alone, in any batch, however its prompt is cut, on any threads."""

from __future__ import annotations

import random

import pytest
import torch
from families import VOCAB_SIZE, build_tiny
from program.stepping import Request, Stepper

from hfpaged.program.program import StepProgram

NEW_TOKENS = 3


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def model(request):
    return build_tiny(request.param).to(torch.bfloat16)


@pytest.fixture(scope="module")
def program(model):
    return StepProgram.build(model, num_threads=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 9, 17, 33)))] for _ in range(64)]


@pytest.fixture(scope="module")
def alone(program, prompts) -> list[torch.Tensor]:
    results = []
    for prompt in prompts:
        stepper = Stepper(program, max_requests=1)
        stepper.greedy([prompt], NEW_TOKENS)
        results.append(torch.stack(stepper.requests[0].logits[-NEW_TOKENS:]))
    return results


def assert_same_bits(request: Request, expected: torch.Tensor) -> None:
    assert torch.equal(torch.stack(request.logits[-NEW_TOKENS:]), expected)


@pytest.mark.parametrize("batch_size", [2, 3, 6, 7, 12, 20, 21, 33, 64])
def test_batch_size_changes_no_bit(program, prompts, alone, batch_size):
    stepper = Stepper(program)
    requests = [stepper.add(prompt) for prompt in prompts[:batch_size]]
    best = stepper.step([(request, len(request.tokens)) for request in requests])
    for _ in range(NEW_TOKENS - 1):
        for request, token in zip(requests, best, strict=True):
            request.tokens.append(int(token))
        best = stepper.step([(request, 1) for request in requests])
    for request, expected in zip(requests, alone, strict=False):
        assert_same_bits(request, expected)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 30])
def test_chunks_of_a_prompt_change_no_bit(program, prompts, alone, chunk):
    for prompt, expected in zip(prompts[:8], alone, strict=False):
        stepper = Stepper(program, max_requests=1)
        stepper.greedy([prompt], NEW_TOKENS, chunk)
        assert_same_bits(stepper.requests[0], expected)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_number_of_threads_changes_no_bit(model, prompts, alone, threads):
    program = StepProgram.build(model, num_threads=threads, min_thread_seconds=0)
    stepper = Stepper(program)
    stepper.greedy(prompts[:16], NEW_TOKENS)
    for request, expected in zip(stepper.requests, alone, strict=False):
        assert_same_bits(request, expected)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_size_changes_no_bit(program, prompts, alone, block_size):
    stepper = Stepper(program, block_size=block_size, max_requests=8)
    stepper.greedy(prompts[:8], NEW_TOKENS)
    for request, expected in zip(stepper.requests, alone, strict=False):
        assert_same_bits(request, expected)

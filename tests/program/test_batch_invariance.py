"""In bf16, a request's logits are the same bits alone, in any batch, however its prompt is cut, on any threads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from families import VOCAB_SIZE, build_tiny
from program.stepping import Request, Stepper
from transformers import AutoModelForCausalLM, PreTrainedModel

from hfpaged.program.program import StepProgram

BATCH_SIZES = range(1, 65)
CHUNKS = (1, 2, 3, 5, 8, 16, 17, 30, 64)
NEW_TOKENS = 3


class Alone:
    """Texts, and the logits at each of their positions, computed one token a step on one thread without neighbours."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.program = StepProgram.build(model, num_threads=1)
        self.tokens: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        rng = random.Random(1)
        for _ in range(max(BATCH_SIZES)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 9, 17, 33)))]
            stepper = Stepper(self.program, max_requests=1)
            stepper.greedy([prompt], NEW_TOKENS, chunk=1)
            self.tokens.append(stepper.requests[0].tokens[:-1])
            self.logits.append(torch.stack(stepper.requests[0].logits))

    def check(self, request: Request) -> None:
        """The last logits of a request, which is the text in its row, are those of the text alone."""
        assert torch.equal(request.logits[-1], self.logits[request.row][request.done - 1])

    def assert_no_bit_changes(
        self, program: StepProgram, chunk: int, block_size: int = 16, batch_sizes: Sequence[int] = BATCH_SIZES
    ) -> None:
        """Steps of these batch sizes, of at most `chunk` tokens a request, change no bit of any logits."""
        stepper = Stepper(program, block_size=block_size, max_requests=len(self.tokens))
        requests = [stepper.add(tokens) for tokens in self.tokens]
        waiting = endless(requests)
        for size in random.Random(chunk).sample(batch_sizes, len(batch_sizes)):
            batch = [next(waiting) for _ in range(size)]
            stepper.step([(one, min(chunk, len(one.tokens) - one.done)) for one in batch])
            for request in batch:
                self.check(request)


def endless(requests: list[Request]) -> Iterator[Request]:
    """The requests in turn, again and again; one that has all its tokens begins anew."""
    while True:
        for request in requests:
            if request.done == len(request.tokens):
                request.done = 0
            yield request


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def alone(request) -> Alone:
    return Alone(build_tiny(request.param).to(torch.bfloat16))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_no_batch_size_and_no_chunk_changes_a_bit(alone, chunk):
    alone.assert_no_bit_changes(alone.program, chunk)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_no_number_of_threads_changes_a_bit(alone, threads):
    program = StepProgram.build(alone.model, threads, min_thread_seconds=0)
    alone.assert_no_bit_changes(program, chunk=17, batch_sizes=BATCH_SIZES[::7])


@pytest.mark.parametrize("block_size", [32, 64])
def test_no_block_size_changes_a_bit(alone, block_size):
    alone.assert_no_bit_changes(alone.program, chunk=16, block_size=block_size, batch_sizes=BATCH_SIZES[::7])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_all_batch_sizes_with_all_chunks_on_all_threads(alone, threads):
    program = StepProgram.build(alone.model, threads, min_thread_seconds=0)
    for chunk in CHUNKS:
        alone.assert_no_bit_changes(program, chunk)


@pytest.fixture(scope="module")
def smollm2_alone(smollm2_path) -> Alone:
    return Alone(AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval())


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_all_batch_sizes_of_smollm2(smollm2_alone, threads):
    program = StepProgram.build(smollm2_alone.model, threads, min_thread_seconds=0)
    for chunk in (1, 17):
        smollm2_alone.assert_no_bit_changes(program, chunk)

"""Requests whose block tables start alike are attended to together, and get the bits that they get alone."""

from __future__ import annotations

import pytest
import torch
from native.paged_problem import PagedProblem, Piece

from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend

# Two families, of 20 and of 3 requests, one request that shares less than a chunk with a family, and a stranger.
FAMILIES = [(0, 20, 1100), (20, 23, 530), (23, 24, 200)]
CONTEXTS = [1101 + 37 * i for i in range(20)] + [531, 900, 1300] + [700, 800]


def share_blocks(problem: PagedProblem) -> None:
    """Let each family's tables start with the blocks of its first request, and the lone sharer's with request 0's."""
    for first, end, tokens in FAMILIES:
        leader = 0 if end - first == 1 else first
        blocks = tokens // problem.block_size
        for request in range(first, end):
            problem.tables[problem.rows[request], :blocks] = problem.tables[problem.rows[leader], :blocks]


@pytest.fixture(scope="module", params=[(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 48)])
def problem(request):
    dtype, block_size = request.param
    problem = PagedProblem(NativeBackend, dtype, LayerShape(2, 64, 32), 6, CONTEXTS, block_size)
    share_blocks(problem)
    return problem


def last_token(request: int) -> Piece:
    return Piece(request, CONTEXTS[request] - 1, CONTEXTS[request])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.125),
        AttentionParams(0.125, softcap=20.0, sinks=torch.linspace(-1, 2, 6)),
        AttentionParams(0.125, window=1200),  # some of a family see its first tokens, some do not
    ],
    ids=["plain", "capped", "window"],
)
def test_together_equals_alone(problem, params, threads):
    torch.set_num_threads(1)
    alone = [problem.run([last_token(request)], params)[0] for request in range(len(CONTEXTS))]
    torch.set_num_threads(threads)
    together = problem.run([last_token(request) for request in range(len(CONTEXTS))], params)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_prompts_beside_a_family_change_no_bit(problem):
    params = AttentionParams(0.125)
    family = [last_token(request) for request in range(20)]
    together = problem.run(family, params)
    mixed = problem.run([Piece(23, 600, 700), *family, Piece(24, 790, 800)], params)
    for one, other in zip(together, mixed[1:-1], strict=True):
        assert torch.equal(one, other)


def test_the_order_of_requests_changes_no_bit(problem):
    params = AttentionParams(0.125)
    order = [7, 21, 3, 24, 0, 22, 19, 20, 23, 1]
    together = problem.run([last_token(request) for request in range(len(CONTEXTS))], params)
    shuffled = problem.run([last_token(request) for request in order], params)
    for request, output in zip(order, shuffled, strict=True):
        assert torch.equal(output, together[request])


def test_many_query_heads_beside_one_key_head():
    """More query heads than one item has rows: nothing is shared, and nothing breaks."""
    problem = PagedProblem(NativeBackend, torch.bfloat16, LayerShape(1, 32, 32), 71, [600] * 4)
    for request in range(4):
        problem.tables[problem.rows[request], :32] = problem.tables[problem.rows[0], :32]
    pieces = [Piece(request, 599, 600) for request in range(4)]
    params = AttentionParams(0.2)
    together = problem.run(pieces, params)
    for piece, output in zip(pieces, together, strict=True):
        assert torch.equal(output, problem.run([piece], params)[0])

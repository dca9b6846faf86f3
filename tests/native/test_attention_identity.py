"""Outputs of the attention kernel do not depend on the batch, on chunking or on threads, to the last bit."""

from __future__ import annotations

import pytest
import torch
from native.paged_problem import PagedProblem, Piece

from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend

CONTEXTS = [37, 1, 300, 530, 4400, 2100]
SETTINGS = [
    AttentionParams(0.125),
    AttentionParams(0.125, window=300, softcap=20.0, sinks=torch.linspace(-1, 2, 6)),
]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def problem(request):
    return PagedProblem(NativeBackend, request.param, LayerShape(2, 64, 32), 6, CONTEXTS)


@pytest.fixture(scope="module")
def alone(problem):
    """Per setting, the last 200 outputs of each request, every token in a step of its own, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    outputs = {
        index: [
            torch.cat([problem.run([Piece(r, t, t + 1)], params)[0] for t in range(max(0, context - 200), context)])
            for r, context in enumerate(CONTEXTS)
        ]
        for index, params in enumerate(SETTINGS)
    }
    torch.set_num_threads(before)
    return outputs


def tails(lengths):
    sizes = zip(CONTEXTS, lengths, strict=True)
    return [Piece(request, max(0, context - length), context) for request, (context, length) in enumerate(sizes)]


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[200] * 6, [37, 1, 150, 1, 1, 1], [5, 1, 1, 200, 64, 1], [1] * 6])
def test_batched_equals_alone(problem, alone, setting, threads, lengths):
    torch.set_num_threads(threads)
    pieces = tails(lengths)
    for piece, output in zip(pieces, problem.run(pieces, SETTINGS[setting]), strict=True):
        assert torch.equal(output, alone[setting][piece.request][-len(output) :])


@pytest.mark.parametrize("threads", [1, 4])
def test_one_long_request_equals_itself_on_more_threads(problem, alone, threads):
    torch.set_num_threads(threads)  # few items and several splits: run in parallel and merged
    (output,) = problem.run([Piece(4, 4399, 4400)], SETTINGS[0])
    assert torch.equal(output, alone[0][4][-1:])


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("chunk", [3, 16, 101])
def test_chunked_equals_alone(problem, alone, setting, chunk):
    for request, context in enumerate(CONTEXTS):
        first = max(0, context - 200)
        pieces = [Piece(request, start, min(start + chunk, context)) for start in range(first, context, chunk)]
        output = torch.cat([problem.run([piece], SETTINGS[setting])[0] for piece in pieces])
        assert torch.equal(output, alone[setting][request])


def test_other_blocks_same_output(problem):
    params = SETTINGS[0]
    moved = PagedProblem(NativeBackend, problem.backend.dtype, LayerShape(2, 64, 32), 6, CONTEXTS, block_size=64)
    pieces = tails([3] * 6)
    for before, after in zip(problem.run(pieces, params), moved.run(pieces, params), strict=True):
        assert torch.equal(before, after)

"""Random ragged batches over a backend's kernels against attention in fp64."""

from __future__ import annotations

import random

import torch
from native.paged_problem import PagedProblem, Piece, last_tokens, whole

from hfpaged.runtime.attention.interface import AttentionBackend, AttentionParams, LayerShape
from hfpaged.runtime.attention.torch_backend import attend

KINDS = {
    "plain": {},
    "window": {"window": 33},
    "softcap": {"softcap": 20.0},
    "window and softcap": {"window": 100, "softcap": 30.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 20},
}
TOLERANCE = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (1.6e-2, 1e-2), torch.float32: (1e-4, 1e-4)}


def check(
    backend: type[AttentionBackend],
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    group: int,
    kind: str,
    seed: int = 0,
) -> None:
    """Whole prompts, single tokens and chunks of five requests. `group` query heads read one KV head."""
    source = random.Random(seed)
    lengths = (1, 2, 15, 16, 17, 100, 333) if device.type == "cuda" else (1, 15, 16, 17, 40)
    contexts = [source.choice((*lengths, source.randrange(1, 2 * lengths[-1]))) for _ in range(5)]
    heads = 2 * group
    params = dict(KINDS[kind])
    if params.get("sinks"):
        params["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(device)
    params = AttentionParams(dims[0] ** -0.5, **params)
    problem = PagedProblem(backend, dtype, LayerShape(2, *dims), heads, contexts, device=device)
    chunks = [source.randrange(1, context + 1) for context in contexts]
    for pieces in (whole(problem), last_tokens(problem, [1] * 5), last_tokens(problem, chunks)):
        assert_close_to_exact(problem, pieces, params)


def assert_close_to_exact(problem: PagedProblem, pieces: list[Piece], params: AttentionParams) -> None:
    """The backend's outputs of some pieces in one step are those of attention in fp64."""
    rtol, atol = TOLERANCE[problem.backend.dtype]
    for piece, output in zip(pieces, problem.run(pieces, params), strict=True):
        states = (problem.query, problem.key, problem.value)
        query, key, value = (of_requests[piece.request][: piece.end].double() for of_requests in states)
        expected = attend(query[piece.first :], key, value, params)
        torch.testing.assert_close(output.double(), expected, rtol=rtol, atol=atol)

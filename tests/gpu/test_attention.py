"""FlashInfer's kernels against attention in fp64, on random ragged batches."""

from __future__ import annotations

import random

import pytest
import torch
from native.paged_problem import PagedProblem, last_tokens, whole

from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.torch_backend import attend

DIMS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (192, 128)]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16]
KINDS = {
    "plain": {},
    "window": {"window": 33},
    "softcap": {"softcap": 20.0},
    "window and softcap": {"window": 100, "softcap": 30.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 20},
}


def check(device, dtype, dims, group, kind, seed=0):
    source = random.Random(seed)
    lengths = (1, 2, 15, 16, 17, 100, 333) if device.type == "cuda" else (1, 15, 16, 17, 40)
    contexts = [source.choice((*lengths, source.randrange(1, 2 * lengths[-1]))) for _ in range(5)]
    heads = 2 * group
    params = dict(KINDS[kind])
    if params.get("sinks"):
        params["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(device)
    params = AttentionParams(dims[0] ** -0.5, **params)
    problem = PagedProblem(FlashInferBackend, dtype, LayerShape(2, *dims), heads, contexts, device=device)
    chunks = [source.randrange(1, context + 1) for context in contexts]
    for pieces in (whole(problem), last_tokens(problem, [1] * 5), last_tokens(problem, chunks)):
        for piece, output in zip(pieces, problem.run(pieces, params), strict=True):
            states = (problem.query, problem.key, problem.value)
            query, key, value = (of_requests[piece.request][: piece.end].double() for of_requests in states)
            expected = attend(query[piece.first :], key, value, params)
            torch.testing.assert_close(output.double(), expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dimensions(device, dims):
    check(device, torch.bfloat16, dims, 4, "plain")


@pytest.mark.parametrize("group", GROUPS)
def test_group_sizes(device, group):
    check(device, torch.bfloat16, (128, 128), group, "plain", seed=group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
def test_windows_caps_and_sinks(device, kind, dim):
    check(device, torch.bfloat16, (dim, dim), 4, kind)


def test_float16(device):
    check(device, torch.float16, (128, 128), 4, "plain")
